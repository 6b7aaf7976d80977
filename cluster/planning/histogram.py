"""`TrafficHistogram`: what kinds of items came lately, as counts that fade with time.

Forward decay (Cormode, Shkapenyuk, Srivastava, Xu: "Forward Decay", ICDE 2009): an item weighs 2 ** (age of the
histogram / half-life) when it comes, and all counts are divided by the weight of now when they are read. So nothing
is touched but the entry that is counted, and a batch reads the clock once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgpack

from encoder.errors import ConfigError
from encoder.types import Grid

Grids = tuple[Grid, ...]
"""The segments of one item, as its shape has them."""

FORMAT_VERSION = 1
_LARGEST_EXPONENT = 512.0  # counts are scaled down before a weight comes near the largest float
_SLACK = 1.25  # entries over the bound before the rarest are dropped, so that dropping costs little an item


class TrafficHistogram:
    """Faded counts of item shapes. One thread at a time; O(1) an item, amortised.

    Args:
        half_life_s: after so many seconds an item counts half.
        max_entries: kinds of items that are told apart; of more, the rarest lately are forgotten.
        now_s: a clock in seconds.
    """

    def __init__(
        self,
        *,
        half_life_s: float = 600.0,
        max_entries: int = 4096,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        if not half_life_s > 0 or max_entries < 1:
            raise ValueError(f"half_life_s is {half_life_s} and max_entries {max_entries}; both are positive")
        self.half_life_s = half_life_s
        self.max_entries = max_entries
        self._now_s = now_s
        self._born_s = self._landmark_s = now_s()
        self._counts: dict[Grids, float] = {}

    def count(self, kinds: Mapping[Grids, float]) -> None:
        """Count so many items of each kind that came just now."""
        weight = self._weight()
        counts = self._counts
        for grids, number in kinds.items():
            counts[grids] = counts.get(grids, 0.0) + number * weight
        if len(counts) > self.max_entries * _SLACK:
            self._drop_rarest()

    def counts(self) -> dict[Grids, float]:
        """Faded counts, the most frequent kind first."""
        weight = self._weight()
        ordered = sorted(self._counts.items(), key=lambda entry: (-entry[1], entry[0]))
        return {grids: count / weight for grids, count in ordered[: self.max_entries]}

    def rates(self) -> dict[Grids, float]:
        """Items per second of each kind, the most frequent first: a mean over about the last 1.44 half-lives."""
        window_s = self._window_s()
        return {grids: count / window_s for grids, count in self.counts().items()}

    def to_bytes(self) -> bytes:
        """As msgpack, with times as ages, so that another process can go on with it."""
        packed: bytes = msgpack.packb(
            {
                "encpool_histogram": FORMAT_VERSION,
                "half_life_s": self.half_life_s,
                "max_entries": self.max_entries,
                "age_s": self._now_s() - self._born_s,
                "counts": list(self.counts().items()),
            }
        )
        return packed

    @classmethod
    def from_bytes(cls, packed: bytes, *, now_s: Callable[[], float] = time.monotonic) -> TrafficHistogram:
        """What `to_bytes` wrote, as if no time had passed since. Raises ConfigError for anything else."""
        try:
            fields = msgpack.unpackb(packed, use_list=False, max_array_len=1 << 20)
            if fields["encpool_histogram"] != FORMAT_VERSION:
                raise ValueError(f"version {fields['encpool_histogram']!r} instead of {FORMAT_VERSION}")
            counts = {as_grids(grids): float(count) for grids, count in fields["counts"]}
            half_life_s, max_entries = float(fields["half_life_s"]), int(fields["max_entries"])
            histogram = cls(half_life_s=half_life_s, max_entries=max_entries, now_s=now_s)
            histogram._counts = counts
            histogram._born_s -= float(fields["age_s"])
        except (ValueError, TypeError, KeyError, msgpack.UnpackException) as error:
            raise ConfigError(f"not a traffic histogram: {type(error).__name__}: {error}") from error
        return histogram

    def _weight(self) -> float:
        """What an item that comes now weighs."""
        exponent = (self._now_s() - self._landmark_s) / self.half_life_s
        if exponent > _LARGEST_EXPONENT:
            self._move_landmark(exponent)
            return 1.0
        return math.exp2(exponent)

    def _move_landmark(self, exponent: float) -> None:
        factor = 2.0 ** -min(exponent, 1100.0)  # beyond it nothing is left of a count
        faded = {grids: count * factor for grids, count in self._counts.items()}
        self._counts = {grids: count for grids, count in faded.items() if count > 0}
        self._landmark_s += exponent * self.half_life_s

    def _window_s(self) -> float:
        """Seconds of steady traffic that would make up the counts."""
        age_s = max(self._now_s() - self._born_s, 1e-3)
        return self.half_life_s / math.log(2) * -math.expm1(-math.log(2) * age_s / self.half_life_s)

    def _drop_rarest(self) -> None:
        ordered = sorted(self._counts.items(), key=lambda entry: (-entry[1], entry[0]))
        self._counts = dict(ordered[: self.max_entries])


def as_grids(value: Any) -> Grids:
    """Grids from plain sequences of numbers. Raises ValueError or TypeError for what is none."""
    grids: list[Grid] = []
    for frames, rows, columns in value:
        grid = (frames, rows, columns)
        if not all(type(number) is int and number > 0 for number in grid):
            raise ValueError(f"{grid!r} is no grid of frames, rows and columns")
        grids.append(grid)
    return tuple(grids)
