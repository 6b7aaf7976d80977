"""Whether a queue takes an item: bounds in milliseconds of work and in bytes, and a part of both for each priority.

Pure; the worker decides by it at its door, and the router ahead of it by what it has leased.
"""

from __future__ import annotations

from dataclasses import dataclass

GUARANTEED = 0.25
"""Part of the bounds that a priority may fill whatever the other one holds: a queue full of batch work takes
interactive items, and the other way round. So a queue may hold up to this much more than its bounds."""


@dataclass(frozen=True, slots=True)
class Load:
    """Work and what it weighs."""

    ms: float
    num_bytes: int

    def __add__(self, other: Load) -> Load:
        return Load(self.ms + other.ms, self.num_bytes + other.num_bytes)

    def __sub__(self, other: Load) -> Load:
        return Load(self.ms - other.ms, self.num_bytes - other.num_bytes)

    def __mul__(self, part: float) -> Load:
        return Load(self.ms * part, int(self.num_bytes * part))


def wait_ms(item: Load, *, total: Load, own: Load, limit: Load) -> float:
    """0 when the item fits, else after how much work it should.

    A priority that has nothing in the queue may bring one item of any size, so that none is refused for ever.

    Args:
        total: what the queue holds.
        own: what of it has the item's priority.
        limit: what it takes.
    """
    if own.ms <= 0:
        return 0.0
    return min(_excess_ms(item, total, limit), _excess_ms(item, own, limit * GUARANTEED))


def _excess_ms(item: Load, held: Load, limit: Load) -> float:
    """How much of what is held must be done before the item fits."""
    over_ms = held.ms + item.ms - limit.ms  # in numbers: the router asks of each of its workers when all are full
    over_bytes = held.num_bytes + item.num_bytes - limit.num_bytes
    if over_bytes > 0:  # bytes go as the work goes
        over_ms = max(over_ms, held.ms * min(1.0, over_bytes / max(1, held.num_bytes)))
    return max(0.0, over_ms)
