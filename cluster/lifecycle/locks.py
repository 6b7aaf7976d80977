"""Locks between commands of one user on one machine: files of the state directory. They end with who holds them."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def locked(path: Path, *, shared: bool = False, wait: bool = True) -> Iterator[bool]:
    """Hold the lock of this file, alone or with others who share it; whether we do. False only without `wait`."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with path.open("w") as file:  # closed by its end: programs that we start do not inherit it
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True
