"""How many workers a group should have for the work that queues in it. Pure decisions; no Ray, no torch.

Work in flight is known in milliseconds, so the number of workers that would have just the aimed queue each follows
from a division. More are wanted when that number was above the present one all the time for `up_after_s`; one fewer
when, with a margin, it was below all the time for `down_after_s`. The margin and the two windows keep a steady load
from making the number swing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.groups import AutoscaleConfig

MARGIN = 1.25  # of the queue that must still fit before a worker is taken away
MOST_GROWTH = 2.0  # times as many workers in one step: queues are guesses, workers take a while to start


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSample:
    """A group's load at one moment."""

    time_s: float
    in_flight_ms: float  # of all its workers together
    refused: bool = False  # whether work was refused since the sample before


def wanted_workers(samples: Sequence[LoadSample], num_workers: int, limits: AutoscaleConfig) -> int:
    """The number of workers to have from now on.

    Args:
        samples: since the last change, oldest first, all taken while as many workers as wanted were ready.
        num_workers: how many are wanted now.
    """
    within = min(max(num_workers, limits.min_workers), limits.max_workers)
    if within != num_workers or not samples:
        return within
    now_s, begun_s = samples[-1].time_s, samples[0].time_s

    def since(window_s: float) -> list[LoadSample]:
        return [sample for sample in samples if sample.time_s >= now_s - window_s]

    if now_s - begun_s >= limits.up_after_s:
        needed = min(_needed(sample, num_workers, limits) for sample in since(limits.up_after_s))
        if needed > num_workers:
            return min(needed, math.ceil(MOST_GROWTH * num_workers), limits.max_workers)
    if now_s - begun_s >= limits.down_after_s and num_workers > limits.min_workers:
        peak_ms = max(sample.in_flight_ms for sample in since(limits.down_after_s))
        refused = any(sample.refused for sample in since(limits.down_after_s))
        if not refused and MARGIN * peak_ms <= (num_workers - 1) * limits.target_queue_ms:
            return num_workers - 1
    return num_workers


def _needed(sample: LoadSample, num_workers: int, limits: AutoscaleConfig) -> int:
    needed = math.ceil(sample.in_flight_ms / limits.target_queue_ms)
    return max(needed, num_workers + 1) if sample.refused else needed


class Autoscaler:
    """The samples of one group since its number last changed."""

    def __init__(self, limits: AutoscaleConfig) -> None:
        self.limits = limits
        self._samples: deque[LoadSample] = deque()
        self._kept_s = max(limits.up_after_s, limits.down_after_s)

    def changed(self) -> None:
        """The number changed, or not all workers are ready: watch anew."""
        self._samples.clear()

    def wanted(self, sample: LoadSample, num_workers: int) -> int:
        """The number of workers to have, now that this was seen."""
        self._samples.append(sample)
        while len(self._samples) > 1 and self._samples[1].time_s < sample.time_s - self._kept_s:
            self._samples.popleft()
        return wanted_workers(self._samples, num_workers, self.limits)
