"""Sizes that Qwen-VL's processors and GLM-4V's resize pictures to: whole tokens within bounds of pixels."""

from __future__ import annotations

import math

from encoder.errors import BadMediaError

MAX_RATIO = 200


def smart_resize(width: int, height: int, *, factor: int, least: int, most: int) -> tuple[int, int]:
    """Width and height that a picture is resized to: multiples of `factor`, between `least` and `most` pixels.

    The rule of the released processors (`smart_resize` in transformers' image_processing_qwen2_vl), to the bit.

    Raises:
        BadMediaError: one side is over 200 times the other, which the processors refuse too.
    """
    _refuse_threads(width, height, f"picture of {width}x{height}", "Qwen-VL")
    return _fit(width, height, 1, 1, factor, least, most)


def resize_volume(
    width: int, height: int, num_frames: int, *, together: int, factor: int, least: int, most: int, model: str
) -> tuple[int, int]:
    """Width and height of each of so many frames, `least` and `most` being pixels of all of them.

    The rule that Qwen3-VL's and GLM-4V's processors share (`smart_resize` in transformers' video_processing_qwen3_vl);
    `together` frames share a patch, and a lone one is repeated. Raises BadMediaError as `smart_resize` does.
    """
    came = f"picture of {width}x{height}"
    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    _refuse_threads(width, height, came, model)
    return _fit(width, height, max(num_frames, together), together, factor, least, most)


def _fit(
    width: int, height: int, num_frames: int, together: int, factor: int, least: int, most: int
) -> tuple[int, int]:
    new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
    volume = round(num_frames / together) * together * new_height * new_width
    if volume > most:
        beta = math.sqrt((num_frames * height * width) / most)
        new_height = max(factor, math.floor(height / beta / factor) * factor)
        new_width = max(factor, math.floor(width / beta / factor) * factor)
    elif volume < least:
        beta = math.sqrt(least / (num_frames * height * width))
        new_height = math.ceil(height * beta / factor) * factor
        new_width = math.ceil(width * beta / factor) * factor
    return new_width, new_height


def _refuse_threads(width: int, height: int, came: str, model: str) -> None:
    if max(height, width) / min(height, width) > MAX_RATIO:
        raise BadMediaError(
            f"{came}: one side is over {MAX_RATIO} times the other, which {model} does not take; crop it"
        )
