"""Which frames of a clip MiniCPM-V reads: the rules of the released models' cards. Free of torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from encoder.config import VideoConfig

FRAMES_PER_S, MAX_FRAMES = 1.0, 64  # 2.6 and 4.0
GROUPED_PER_S, MAX_BLOCKS, USUAL_GROUP, MAX_GROUP = 3.0, 180, 3, 6  # 4.5: of groups, and of frames in a group
TIME_STEP_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameGroups:
    """The frames that are read, and the times of each group of them."""

    numbers: list[int]
    times: list[tuple[int, ...]]  # in steps of `TIME_STEP_S`


def choose_frames(num_frames: int, frames_per_s: float, options: VideoConfig) -> FrameGroups:
    """2.6 and 4.0: one frame a second, thinned evenly to at most 64; each is a group of its own."""
    most = options.num_frames or options.max_frames or MAX_FRAMES
    step = 1 if options.num_frames else max(1, round(frames_per_s / (options.fps or FRAMES_PER_S)))
    numbers = list(range(0, num_frames, step))
    if len(numbers) > most:
        numbers = [numbers[index] for index in _evenly(len(numbers), most)]
    elif len(numbers) < (options.min_frames or 1):
        numbers = _evenly(num_frames, min(options.min_frames or 1, num_frames))
    return FrameGroups(numbers=numbers, times=[(0,) for _ in numbers])


def choose_groups(num_frames: int, frames_per_s: float, options: VideoConfig) -> FrameGroups:
    """4.5: three frames a second, spread evenly; joined in groups where they would be more than 180 blocks.

    The rule of `encode_video` on the model's card (README of OpenBMB/MiniCPM-V, "Chat with Video") with its constants
    180, 3 and 0.1 s; some copies have groups of up to 6, for which there is `max_group_frames`. As there, frames of
    clips slower than three a second come more than once.

    `options.max_frames` is the most blocks here, `options.max_group_frames` the most frames in a group.
    """
    seconds = num_frames / frames_per_s
    wanted, most = options.fps or GROUPED_PER_S, options.max_frames or MAX_BLOCKS
    largest = options.max_group_frames or USUAL_GROUP
    if options.num_frames is not None:
        count = min(options.num_frames, num_frames)
        group = min(largest, math.ceil(count / most))
    elif wanted * int(seconds) <= most:
        group, count = 1, round(min(wanted, round(frames_per_s)) * min(most, seconds))
    else:
        group = math.ceil(seconds * wanted / most)
        count = round(seconds * wanted) if group <= largest else most * largest
        group = min(group, largest)
    numbers = _evenly(num_frames, max(count, min(options.min_frames or 1, num_frames)))
    times = _time_steps(np.array(numbers) / frames_per_s, seconds)
    return FrameGroups(
        numbers=numbers, times=[tuple(times[start : start + group]) for start in range(0, len(times), group)]
    )


def _evenly(total: int, count: int) -> list[int]:
    """The middle of each of `count` equal parts."""
    gap = total / count
    return [int(index * gap + gap / 2) for index in range(count)]


def _time_steps(frame_s: np.ndarray, seconds: float) -> list[int]:
    """The nearest multiple of the step within the clip, counted in steps; expressions as released.

    Half way between two it is the earlier; the card's search tree takes either.
    """
    scale = np.arange(0, seconds, TIME_STEP_S)
    after = np.searchsorted(scale, frame_s).clip(1, max(1, len(scale) - 1))
    nearest = after - (frame_s - scale[after - 1] <= scale[np.minimum(after, len(scale) - 1)] - frame_s)
    steps = (scale[np.minimum(nearest, len(scale) - 1)] / TIME_STEP_S).astype(np.int32)
    return [int(step) for step in steps]
