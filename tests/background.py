"""Something that goes on in a thread while a test does something else."""

from __future__ import annotations

import threading
from typing import Self


class Background:
    """Runs `run` in a thread while it is in a `with` block; `run` looks whether it has come to its end."""

    join_s = 30.0

    def __init__(self) -> None:
        self.end = threading.Event()
        self._thread = threading.Thread(target=self.run, daemon=True)

    def run(self) -> None:
        """Returns soon after `end` is set."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end.set()
        self._thread.join(self.join_s)
        assert not self._thread.is_alive()
