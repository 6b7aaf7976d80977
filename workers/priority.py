"""Interactive work before batch work, and batch work not for ever behind it. No torch, no Ray.

Work is served in the order of the moments it came, where batch work counts as having come `patience_s` later (aging:
what has waited outranks what comes new). So interactive work passes the batch work of the last seconds, and no batch
item is passed by anything that comes after its patience is over: it waits that long and for what was ahead of it then,
which admission bounds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import StrEnum
from typing import Generic, Protocol, TypeVar

from encoder.errors import ConfigError


class Priority(StrEnum):
    """How urgent an item is."""

    INTERACTIVE = "interactive"  # somebody waits for this one
    BATCH = "batch"  # one of many


def read_priority(given: str) -> Priority:
    """The priority of this name. Raises ConfigError for another."""
    try:
        return Priority(given)
    except ValueError as error:
        raise ConfigError(f"no priority {given!r}: it is 'interactive' or 'batch'") from error


def rank_s(priority: Priority, came_s: float, patience_s: float) -> float:
    """Place in the order of service: the least goes first."""
    return came_s + (patience_s if priority is Priority.BATCH else 0.0)


class Ranked(Protocol):
    """What waits in a line."""

    @property
    def priority(self) -> Priority: ...

    @property
    def rank_s(self) -> float: ...


T = TypeVar("T", bound=Ranked)


class Line(Generic[T]):
    """What waits, least rank first; first come, first served within a priority. Every step takes constant time."""

    def __init__(self) -> None:
        self._queues: dict[Priority, deque[T]] = {priority: deque() for priority in Priority}

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def append(self, entry: T) -> None:
        """Queue behind its own kind."""
        self._queues[entry.priority].append(entry)

    def pop(self, among: Sequence[Priority] = tuple(Priority)) -> T | None:
        """Take out whose turn it is, of these priorities."""
        queues = [self._queues[priority] for priority in among if self._queues[priority]]
        return min(queues, key=lambda queue: queue[0].rank_s).popleft() if queues else None

    def put_back(self, entries: Sequence[T]) -> None:
        """Entries just taken, in the order they were: they keep their places."""
        for entry in reversed(entries):
            self._queues[entry.priority].appendleft(entry)

    def clear(self) -> None:
        """Drop everything."""
        for queue in self._queues.values():
            queue.clear()
