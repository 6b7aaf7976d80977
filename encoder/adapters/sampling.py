"""Frames of a clip by number, or within bounds, where that is asked for instead of what a model's own rule takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from encoder.config import VideoConfig


def spread(total: int, count: int) -> list[int]:
    """So many of `total` frames, evenly from the first to the last; all of them where there are no more."""
    return [int(number) for number in np.linspace(0, total - 1, min(count, total)).round()]


def within_bounds(numbers: Sequence[int], total: int, options: VideoConfig) -> list[int]:
    """The frames that a rule chose of `total`; fewer or more of them where bounds are asked for."""
    if options.max_frames and len(numbers) > options.max_frames:
        return [numbers[place] for place in spread(len(numbers), options.max_frames)]
    if options.min_frames and len(numbers) < options.min_frames:
        return spread(total, options.min_frames)
    return list(numbers)
