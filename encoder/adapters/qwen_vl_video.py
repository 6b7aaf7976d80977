"""Which frames of a clip Qwen-VL reads, and at which size: the rules of the released video processors."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from encoder.adapters.qwen_vl_config import QwenSizes
from encoder.adapters.smart_resize import resize_volume, smart_resize

if TYPE_CHECKING:
    from encoder.config import VideoConfig
    from encoder.media import MediaHeader

CONTEXT_TOKENS = 128_000  # the language model's, nine tenths of which a clip may fill (2 and 2.5)
FRAME_TOKENS = 768  # most of a frame when `cap_frames` holds (3)


def sampled_frames(header: MediaHeader, sizes: QwenSizes, options: VideoConfig) -> list[int]:
    """Numbers of the frames that the model reads, rising; at least one.

    `options.fps` frames a second within bounds, spread over the whole clip, or `options.num_frames` of them.
    """
    total = header.num_frames
    least, most = sizes.frame_bounds
    least, most, rate = options.min_frames or least, options.max_frames or most, options.fps or sizes.frames_per_s
    together = sizes.temporal_patch_size
    if sizes.generation == "3":
        wanted = options.num_frames
        if wanted is None:
            wanted = max(int(total / header.frames_per_s * rate), least)
        count = max(1, min(wanted, most, total))
        return [int(index) for index in np.linspace(0, total - 1, count).round()]
    if options.num_frames is not None:
        count = min(round(options.num_frames / together), total // together) * together
    else:
        seconds = total / header.frames_per_s
        within = min(max(seconds * rate, least), min(most, total) // together * together)
        count = math.floor(within / together) * together
    if count < 1:
        return [0]
    step = total / count
    # As many as `torch.arange(0, total, step)` has, but in double: its float32 is a frame off far into long clips.
    return [min(total - 1, int(index * step)) for index in range(math.ceil(total / step))]


def frame_size(header: MediaHeader, num_frames: int, sizes: QwenSizes) -> tuple[int, int]:
    """Width and height of each of so many frames. Raises BadMediaError as `smart_resize` does."""
    factor, pixels = sizes.token_side, sizes.video_pixels
    if sizes.generation != "3":
        most = pixels.most
        if sizes.cap_frames:
            share = int(CONTEXT_TOKENS * factor * factor * 0.9) * sizes.temporal_patch_size // num_frames
            most = max(min(most, share), int(pixels.least * 1.05))
        return smart_resize(header.width, header.height, factor=factor, least=pixels.least, most=most)
    most = pixels.most
    if sizes.cap_frames:
        share = max(min(FRAME_TOKENS * factor * factor, pixels.most // num_frames), int(pixels.least * 1.05))
        most = share * num_frames
    return resize_volume(
        header.width,
        header.height,
        num_frames,
        together=sizes.temporal_patch_size,
        factor=factor,
        least=pixels.least,
        most=most,
        model="Qwen-VL",
    )
