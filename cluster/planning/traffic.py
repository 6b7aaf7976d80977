"""`TrafficLog`: what a router sees of its traffic. Faded counts of shapes and of outcomes, and records for a trace."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cluster.planning.histogram import Grids, TrafficHistogram
from workers.messages import Beat, TracedItem

HALF_LIFE_S = 600.0
TRACE_IDLE_S = 15.0  # a trace that nobody fetches for so long is over
MAX_TRACED = 100_000  # items kept for the next fetch; older ones are lost


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What a pool's planner needs to know of its traffic."""

    histogram: bytes  # `TrafficHistogram.to_bytes`: kinds of items that got leases
    outcomes: Mapping[str, float]  # faded counts of segments: "graph", or the reason why they ran eagerly

    @property
    def hit_rate(self) -> float:
        """Share of the segments that graphs served lately; 0 without any."""
        total = sum(self.outcomes.values())
        return self.outcomes.get("graph", 0.0) / total if total else 0.0


class TrafficLog:
    """One thread at a time."""

    def __init__(self, *, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._histogram = TrafficHistogram(half_life_s=HALF_LIFE_S, now_s=now_s)
        self._outcomes: dict[str, float] = {}
        self._faded_s = now_s()
        self._trace: deque[TracedItem] = deque(maxlen=MAX_TRACED)
        self._trace_until_s = float("-inf")

    def count(self, kinds: Mapping[Grids, float]) -> None:
        """So many items of each kind got leases lately."""
        if kinds:
            self._histogram.count(kinds)

    def hear(self, beat: Beat) -> None:
        """A worker tells what became of its segments since its last beat."""
        if beat.outcomes:
            self._fade()
            for outcome, number in beat.outcomes:
                self._outcomes[outcome] = self._outcomes.get(outcome, 0.0) + number
        if beat.traced and self.is_tracing:
            self._trace.extend(beat.traced)

    def traffic(self) -> Traffic:
        """As it stands now."""
        self._fade()
        return Traffic(histogram=self._histogram.to_bytes(), outcomes=dict(self._outcomes))

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

    def _fade(self) -> None:
        now_s = self._now_s()
        factor = 2.0 ** -((now_s - self._faded_s) / HALF_LIFE_S)
        self._outcomes = {outcome: count * factor for outcome, count in self._outcomes.items() if count * factor > 1e-6}
        self._faded_s = now_s
