"""`CostBook`: what runs take on this device, measured at capture and corrected by what they take in traffic.

It outlives the graphs: one that is dropped and captured again begins with what was learned of it. Free of torch.
"""

from __future__ import annotations

import statistics
from collections import deque

from encoder.types import GraphKey

LEARNING_RATE = 0.05
NEARLY_FULL = 0.9  # replays with fewer useful rows say less of what a full one takes
MOST_SLACK = 0.8
MAX_ERRORS = 512  # of the latest runs
FEW_ERRORS = 8  # say nothing yet


class CostBook:
    """Costs by graph key, and how far predictions were off. One thread writes; others may read `error`."""

    def __init__(self) -> None:
        self.drift = 1.0
        """Of what replays take now to what they took when they were measured: clocks and neighbours change it."""
        self.eager_factor = 1.0
        """Of what eager runs take to what was predicted for them, drift included in the prediction."""
        self.slack = 0.0
        """Part of a replay's time that its pad rows save: they pass through the GEMMs and attend to nothing."""
        self._measured_ms: dict[GraphKey, float] = {}
        self._cost_ms: dict[GraphKey, float] = {}
        self._errors: deque[float] = deque(maxlen=MAX_ERRORS)

    def note(self, key: GraphKey, measured_ms: float) -> None:
        """Remember a measured replay, unless more is known of this graph already."""
        self._measured_ms.setdefault(key, measured_ms)
        self._cost_ms.setdefault(key, measured_ms)

    def cost_ms(self, key: GraphKey) -> float | None:
        """What a replay of this graph takes; None: it was never captured."""
        return self._cost_ms.get(key)

    def slowed(self, key: GraphKey) -> float:
        """Of what its replays take now to what they took when they were measured."""
        measured_ms = self._measured_ms.get(key, 0.0)
        return self._cost_ms[key] / measured_ms if measured_ms > 0 else 1.0

    def learn(self, key: GraphKey, elapsed_ms: float, fullness: float) -> float:
        """A replay took so long; `fullness` is the useful share of its rows. Returns what was predicted for it."""
        cost_ms = self._cost_ms[key]
        saved = self.slack * (1 - fullness)
        predicted_ms = cost_ms * (1 - saved)
        self._count_error(predicted_ms, elapsed_ms)
        if fullness < NEARLY_FULL:
            if cost_ms > 0:
                slack = (1 - elapsed_ms / cost_ms) / (1 - fullness)
                self.slack += LEARNING_RATE * (min(MOST_SLACK, max(0.0, slack)) - self.slack)
            return predicted_ms
        full_ms = elapsed_ms / (1 - saved)
        self._cost_ms[key] = cost_ms + LEARNING_RATE * (full_ms - cost_ms)
        if self._measured_ms[key] > 0:
            self.drift += LEARNING_RATE * (full_ms / self._measured_ms[key] - self.drift)
        return predicted_ms

    def learn_eager(self, predicted_ms: float, elapsed_ms: float) -> None:
        """An eager run took so long, where so much was predicted with the factor as it is."""
        self._count_error(predicted_ms, elapsed_ms)
        if predicted_ms > 0:  # the first run of a size may take ever so long: kernels load, memory is allocated
            self.eager_factor *= 1 + LEARNING_RATE * (min(2.0, max(0.5, elapsed_ms / predicted_ms)) - 1)

    def forget_errors(self) -> None:
        """What was off while a worker started says nothing of its traffic."""
        self._errors.clear()

    @property
    def error(self) -> float | None:
        """Median of |predicted - real| / real over the latest runs; None: too few so far."""
        errors = list(self._errors)
        return statistics.median(errors) if len(errors) >= FEW_ERRORS else None

    def _count_error(self, predicted_ms: float, elapsed_ms: float) -> None:
        if elapsed_ms > 0:
            self._errors.append(abs(predicted_ms - elapsed_ms) / elapsed_ms)
