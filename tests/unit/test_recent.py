"""What the live page remembers."""

from __future__ import annotations

from cluster.gateway.recent import MAX_MESSAGE, Recent


def test_equal_errors_in_a_row_are_one_however_long_their_message_is() -> None:
    recent = Recent()
    for message in ("short", "short", "long" * MAX_MESSAGE, "long" * MAX_MESSAGE, "short"):
        recent.note(500, "EncodeError", message)
    assert [(len(error["message"]), error["count"]) for error in recent.errors] == [(5, 1), (MAX_MESSAGE, 2), (5, 2)]
