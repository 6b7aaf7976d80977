"""A metric's value at a moment, as it travels from a worker to whoever exports it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Distribution:
    """What a histogram has seen."""

    counts: tuple[int, ...]  # observations in each bucket, not cumulative; the last bucket has no end
    total: float  # of all values

    @property
    def num_observations(self) -> int:
        """How many there were."""
        return sum(self.counts)


class Sample(NamedTuple):
    """One line of a metric."""

    name: str
    labels: tuple[str, ...]  # values, in the order of the metric's labels
    value: float | Distribution
