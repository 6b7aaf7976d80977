"""Where Qwen-VL's patches lie: sizes that pictures are resized to, and everything that a grid of patches determines.

Rows of a grid come token by token: the patches of a token follow one another, so that merging is a reshape. Tokens come
row by row of the frame, or window by window where the model has windows.
"""

# Shapes: P patches of one frame, T its tokens, W its windows.

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

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


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameIndices:
    """All that a frame's grid determines."""

    rows_P: np.ndarray  # int32, of each patch
    columns_P: np.ndarray
    run_order_T: np.ndarray  # int32: the token, counted row by row, that comes at each place
    places_T: np.ndarray  # int32: the place of each token, counted row by row
    window_patches_W: np.ndarray  # int32


@lru_cache(maxsize=256)
def frame_indices(rows: int, columns: int, merge: int, window: int) -> FrameIndices:
    """Indices of a frame of so many patches; `window` is a window's side in tokens, 0 without windows."""
    tokens = np.arange(rows // merge * (columns // merge), dtype=np.int32).reshape(rows // merge, columns // merge)
    window_patches = np.empty(0, np.int32)
    run_order = tokens.ravel()
    if window:
        windows = [
            tokens[top : top + window, left : left + window].ravel()
            for top in range(0, tokens.shape[0], window)
            for left in range(0, tokens.shape[1], window)
        ]
        run_order = np.concatenate(windows)
        window_patches = np.array([len(one) for one in windows], np.int32) * merge**2
    token_row, token_column = np.divmod(run_order, columns // merge)
    inner_row, inner_column = np.divmod(np.arange(merge**2, dtype=np.int32), merge)
    return FrameIndices(
        rows_P=(token_row[:, None] * merge + inner_row).ravel(),
        columns_P=(token_column[:, None] * merge + inner_column).ravel(),
        run_order_T=run_order,
        places_T=np.argsort(run_order).astype(np.int32),
        window_patches_W=window_patches,
    )
