"""`TrafficLog`: what a router sees of a model's traffic. Faded counts of kinds of items, and records for a trace."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from cluster.planning.histogram import TrafficHistogram
from workers.messages import TracedItem

HALF_LIFE_S = 600.0
TRACE_IDLE_S = 15.0  # a trace that nobody fetches for so long is over
MAX_TRACED = 100_000  # items kept for the next fetch; older ones are lost


class TrafficLog:
    """One thread at a time."""

    def __init__(self, *, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self.histogram = TrafficHistogram(half_life_s=HALF_LIFE_S, now_s=now_s)
        """Of items that got leases."""
        self._trace: deque[TracedItem] = deque(maxlen=MAX_TRACED)
        self._trace_until_s = float("-inf")

    def hear(self, traced: Sequence[TracedItem]) -> None:
        """A worker tells of items that ended there since its last beat."""
        if self.is_tracing:
            self._trace.extend(traced)

    @property
    def is_tracing(self) -> bool:
        """Whether workers should tell of each item."""
        return self._now_s() < self._trace_until_s

    def take_trace(self) -> tuple[TracedItem, ...]:
        """Items that ended since the last time; tracing begins with the first call, and ends when calls do."""
        self._trace_until_s = self._now_s() + TRACE_IDLE_S
        taken = tuple(self._trace)
        self._trace.clear()
        return taken
