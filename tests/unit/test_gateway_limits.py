"""Who may do what at a gateway, and how much."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes import Clock

from cluster.gateway.auth import RIGHTS, TokenBook, read_tokens, require
from cluster.gateway.config import GatewayConfig
from cluster.gateway.limits import CallerLimits, Refused, Room
from cluster.gateway.statuses import STATUS, joint_status, status_of
from encoder.errors import ERRORS, ConfigError, ForbiddenError, ItemError, UnauthorizedError

TOKEN = "0123456789abcdef"


def book(tmp_path: Path, text: str) -> TokenBook:
    file = tmp_path / "tokens"
    file.write_text(text)
    return read_tokens(file)


def test_a_tokens_file_names_people_and_their_rights(tmp_path: Path) -> None:
    tokens = book(tmp_path, f"# people\nann {TOKEN}a\n\nbob {TOKEN}b watch # looks\n")
    ann, bob = tokens.caller(f"Bearer {TOKEN}a"), tokens.caller(f"bearer  {TOKEN}b")
    assert (ann.name, ann.rights) == ("ann", RIGHTS)
    require(bob, "watch")
    with pytest.raises(ForbiddenError, match="'bob' may watch, not encode"):
        require(bob, "encode")
    for wrong in (
        None,
        "",
        TOKEN,
        "Basic x",
        "Bearer",
        "Bearer ",
        f"Bearer {TOKEN}",
        f"Bearer {TOKEN}c",
        "Bearer \udcff\udcfe",
    ):
        with pytest.raises(UnauthorizedError):
            tokens.caller(wrong)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no token in it"),
        ("ann", ":1: a line is a name, a token"),
        ("ann short", "a token of 16 letters at least"),
        (f"ann {TOKEN} dance", "a right is one of encode, watch"),
    ],
)
def test_a_tokens_file_that_lets_nobody_in_is_refused_without_telling_secrets(
    tmp_path: Path, text: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        book(tmp_path, text)
    assert TOKEN not in str(raised.value)


def test_a_caller_may_ask_a_seconds_worth_at_once_and_then_at_the_rate() -> None:
    clock = Clock()
    limits = CallerLimits(GatewayConfig(requests_per_s=2), now_s=clock)

    def ask(name: str = "ann") -> bool:
        try:
            with limits.request(name):
                return True
        except Refused:
            return False

    assert [ask() for _ in range(4)] == [True, True, False, False]
    assert ask("bob")
    with pytest.raises(Refused) as refused, limits.request("ann"):
        pass
    assert refused.value.retry_after_s == 1
    clock.now += 0.5
    assert [ask(), ask()] == [True, False]
    clock.now += 100
    assert [ask() for _ in range(3)] == [True, True, False]


def test_a_slow_rate_says_when_the_next_request_may_come() -> None:
    limits = CallerLimits(GatewayConfig(requests_per_s=0.1), now_s=Clock())
    with limits.request("ann"):
        pass
    with pytest.raises(Refused) as refused, limits.request("ann"):
        pass
    assert refused.value.retry_after_s == 10


def test_callers_with_nothing_under_way_are_forgotten_when_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.gateway.limits.MAX_CALLERS", 2)
    limits = CallerLimits(GatewayConfig())
    with limits.request("ann"):
        for name in ("bob", "cid", "dan"):
            with limits.request(name):
                pass
        assert set(limits._callers) == {"ann", "dan"}


def test_requests_at_once_are_counted_until_they_end() -> None:
    limits = CallerLimits(GatewayConfig(max_requests_in_flight=1))
    with limits.request("ann"):
        with pytest.raises(Refused, match="1 requests under way"), limits.request("ann"):
            pass
        with limits.request("bob"):
            pass
    with limits.request("ann"):
        pass


def test_a_full_room_says_when_half_of_it_will_be_free() -> None:
    clock = Clock()
    room = Room(GatewayConfig(max_open_items=10, max_open_bytes=100), now_s=clock)
    with room.request() as first:
        first.take(num_items=40)  # what alone is too much still fits alone
        first.take(num_bytes=1)  # and its bytes do
    with room.request() as first, room.request() as second:
        first.take(num_items=10, num_bytes=500)
        with pytest.raises(Refused, match="10 items are under way here and 10 are the limit") as refused:
            second.take(num_items=1)
        assert refused.value.retry_after_s == 2  # 40 items in ten seconds: five take 1.25 s
        with pytest.raises(Refused, match="MiB are under way"):
            second.take(num_bytes=1)
        first.take(num_bytes=1)  # it is the only one
    assert (room.num_items, room.num_bytes, room.num_requests) == (0, 0, 0)


def test_a_room_that_is_never_full_remembers_no_more_than_the_last_seconds() -> None:
    clock = Clock()
    room = Room(GatewayConfig(), now_s=clock)
    for _ in range(100):
        with room.request() as share:
            share.take(num_items=1)
            clock.now += 1
    assert len(room._ends) <= 11
    clock.now += 100
    assert room._clear_in_s() == 5, "what ended long ago says nothing of now"


def test_every_error_of_an_item_or_a_request_has_a_status() -> None:
    assert {kind.__name__ for kind in STATUS} <= ERRORS.keys()
    for kind in ERRORS.values():
        assert 400 <= status_of(kind("x")) < 600
        if issubclass(kind, ItemError) and kind is not ItemError:
            assert kind in STATUS


def test_items_that_end_alike_give_the_answer_their_status() -> None:
    assert joint_status([200, 200]) == 200
    assert joint_status([422, 422]) == 422
    assert joint_status([200, 422, 200]) == 207
