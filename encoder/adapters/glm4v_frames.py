"""Which frames of a clip GLM-4V reads: the rules of its video processors in transformers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from encoder.adapters.sampling import spread, within_bounds

if TYPE_CHECKING:
    from encoder.config import VideoConfig

FRAMES_PER_S, MAX_DURATION_S = 2.0, 300.0  # GLM-4.1V and 4.5V
STAGES = ((30, 3.0), (300, 1.0), (2400, 0.5))  # GLM-4.6V: up to so many seconds, so many pairs of frames a second
MOST_STAGED = 640  # frames


def choose_frames(
    total: int, frames_per_s: float, options: VideoConfig, settings: Mapping[str, Any], together: int
) -> list[int]:
    """Numbers of the frames, rising; an even number of them, for which the last may come twice.

    `settings` are the video processor's, whose name says which rule it has.
    """
    if options.num_frames is not None:
        numbers = spread(total, options.num_frames)
    elif options.fps is None and str(settings.get("video_processor_type", "")).startswith("Glm46V"):
        numbers = within_bounds(staged_frames(total, frames_per_s, together), total, options)
    else:
        rate = options.fps or settings.get("fps") or FRAMES_PER_S
        longest_s = settings.get("max_duration") or MAX_DURATION_S
        numbers = within_bounds(rated_frames(total, frames_per_s, rate, longest_s), total, options)
    return numbers + numbers[-1:] * (len(numbers) % 2)


def rated_frames(total: int, frames_per_s: float, wanted_per_s: float, max_duration_s: float) -> list[int]:
    """So many a second; of a longer clip as many as the longest would have, spread over it (`Glm4vVideoProcessor`)."""
    seconds = total / frames_per_s
    if seconds <= max_duration_s:
        count = max(math.floor(seconds * wanted_per_s), 1)
        numbers = [math.ceil(index * frames_per_s / wanted_per_s) for index in range(count)]
    else:
        count = int(max_duration_s * wanted_per_s)
        if count >= total:
            return list(range(total))
        numbers = [math.ceil(second * frames_per_s) for second in np.linspace(0, seconds, count)]
    return _once(min(total - 1, number) for number in numbers)


def staged_frames(total: int, frames_per_s: float, together: int) -> list[int]:
    """A rate that falls with the clip's length, and at most 640 (`Glm46VVideoProcessor`)."""
    seconds = total / frames_per_s
    longest = STAGES[-1][0]
    rate = next((rate for limit, rate in STAGES if seconds <= limit), STAGES[-1][1])
    wanted = max(1, min(int(min(seconds, longest) * rate * together), MOST_STAGED))
    numbers = _spaced(total, frames_per_s, 1 / (together * rate), int(seconds)) if total >= wanted else []
    if total < wanted or len(numbers) > wanted:
        first, last = 0, total - 1
    elif len(numbers) < wanted:
        first, last = (numbers[0], numbers[-1]) if numbers else (0, total - 1)
    else:
        return numbers
    return _once(int(number) for number in np.linspace(first, last, wanted, dtype=int))


def _spaced(total: int, frames_per_s: float, spacing_s: float, end_s: int) -> list[int]:
    """The first frame at or after each multiple of the spacing, until the end."""
    numbers, next_s, frame_s = [], 0.0, 1 / frames_per_s
    for number in range(total):
        if number * frame_s >= next_s:
            next_s += spacing_s
            numbers.append(number)
            if next_s >= end_s:
                break
    return numbers


def _once(numbers: Iterable[int]) -> list[int]:
    return list(dict.fromkeys(numbers))
