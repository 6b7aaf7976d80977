"""`TrafficLog`: what a router sees of a model's traffic. Faded counts of kinds of items, and records for a trace."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cluster.planning.histogram import TrafficHistogram
from workers.messages import TracedItem

HALF_LIFE_S = 600.0
TRACE_IDLE_S = 15.0  # a trace that nobody fetches for so long is over
MAX_TRACED = 100_000  # items kept for the next fetch; older ones are lost


@dataclass(slots=True)
class _Recording:
    """What one recorder has not fetched yet."""

    items: deque[TracedItem] = field(default_factory=lambda: deque(maxlen=MAX_TRACED))
    until_s: float = 0.0


class TrafficLog:
    """One thread at a time."""

    def __init__(self, *, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self.histogram = TrafficHistogram(half_life_s=HALF_LIFE_S, now_s=now_s)
        """Of items that got leases."""
        self._recordings: dict[str, _Recording] = {}  # by recorder

    def hear(self, traced: Sequence[TracedItem]) -> None:
        """A worker tells of items that ended there since its last beat."""
        if self.is_tracing:
            for recording in self._recordings.values():
                recording.items.extend(traced)

    @property
    def is_tracing(self) -> bool:
        """Whether workers should tell of each item; recordings whose recorder has gone end here."""
        now_s = self._now_s()
        for recorder in [name for name, recording in self._recordings.items() if recording.until_s <= now_s]:
            del self._recordings[recorder]
        return bool(self._recordings)

    def take_trace(self, recorder: str) -> tuple[TracedItem, ...]:
        """Items that ended since this recorder asked before; its trace begins with the first call, ends when calls do.

        Each recorder gets all items, however many record.
        """
        recording = self._recordings.setdefault(recorder, _Recording())
        recording.until_s = self._now_s() + TRACE_IDLE_S
        taken = tuple(recording.items)
        recording.items.clear()
        return taken
