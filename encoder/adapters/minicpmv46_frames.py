"""Which frames of a clip MiniCPM-V 4.6 reads: the rule of its video processor in transformers, without stacking."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from encoder.adapters.sampling import spread, within_bounds

if TYPE_CHECKING:
    from encoder.config import VideoConfig

FRAMES_PER_S, MAX_FRAMES = 1.0, 128
STEP_S = 0.1  # between the frames that those of a long clip are chosen from


def choose_frames(total: int, frames_per_s: float, options: VideoConfig, *, most: int) -> list[int]:
    """Numbers of the frames, never falling: one a second, and of clips longer than `most` seconds that many."""
    if options.num_frames is not None:
        return spread(total, options.num_frames)
    seconds, rate = total / frames_per_s, options.fps or FRAMES_PER_S
    most = options.max_frames or most
    if seconds * rate > most:
        times = [round(step * STEP_S, 1) for step in range(int(seconds / STEP_S))]
        chosen = np.linspace(0, len(times) - 1, most, dtype=int) if len(times) > most else range(len(times))
        return [min(int(times[place] * frames_per_s), total - 1) for place in chosen]
    numbers = [int(index * frames_per_s / rate) for index in range(math.ceil(seconds * rate))]
    return within_bounds(numbers, total, options)
