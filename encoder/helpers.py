"""Threads that help with one picture, or with copying its pixels, where a caller has some to spare."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import TypeVar

import numpy as np

Result = TypeVar("Result")

COPY_BYTES = 1 << 20
"""Of a copy that is worth a thread: a tenth of a millisecond or two."""

MAX_COPIERS = 4
"""More of them wait for the memory."""

_helpers: ContextVar[Executor | None] = ContextVar("helpers", default=None)


@contextmanager
def helped_by(threads: Executor | None) -> Iterator[None]:
    """In the body, `run_all` of this thread uses `threads` too, if any; they must not wait for others themselves."""
    token = _helpers.set(threads)
    try:
        yield
    finally:
        _helpers.reset(token)


def run_all(tasks: Sequence[Callable[[], Result]]) -> list[Result]:
    """Results of all tasks, in order: at the same time where threads help, else one after the other."""
    threads = _helpers.get()
    if threads is None or len(tasks) < 2:
        return [task() for task in tasks]
    others = [threads.submit(task) for task in tasks[:-1]]
    last = tasks[-1]()
    return [*(other.result() for other in others), last]


def copy_all(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
    """Copy the second array of each pair into the first, which has as many rows; threads that help share the rows."""
    num_copiers = min(MAX_COPIERS, sum(target.nbytes for target, _ in pairs) // COPY_BYTES)
    if _helpers.get() is None or num_copiers < 2:
        _copy(pairs)
        return
    pieces = []
    for target, source in pairs:
        step = max(1, COPY_BYTES * len(target) // max(1, target.nbytes))
        pieces += [(target[row : row + step], source[row : row + step]) for row in range(0, len(target), step)]
    run_all([partial(_copy, pieces[copier::num_copiers]) for copier in range(num_copiers)])


def _copy(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
    for target, source in pairs:
        target[...] = source
