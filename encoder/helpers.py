"""Threads that help with one picture where a caller has some to spare."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

Result = TypeVar("Result")

_helpers: ContextVar[Executor | None] = ContextVar("helpers", default=None)


@contextmanager
def helped_by(threads: Executor) -> Iterator[None]:
    """In the body, `run_all` of this thread uses `threads` too; they must not wait for others themselves."""
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
