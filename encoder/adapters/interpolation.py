"""How a square table of position embeddings is read at a grid of patches: table rows and weights for each patch."""

# Shapes: P patches of a frame.

from __future__ import annotations

from functools import lru_cache

import numpy as np

from encoder.adapters.qwen_vl_geometry import frame_indices

CUBIC = -0.75
"""Parameter of Keys' convolution kernel, as torch interpolates bicubically."""


@lru_cache(maxsize=256)
def bicubic_taps(rows: int, columns: int, merge: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Bicubic with corners not aligned: sixteen table rows (int32 `[P, 16]`) and their weights (float32 `[P, 16]`).

    Taps beyond the table stand for its border, as in `F.interpolate` and in `F.grid_sample(padding_mode="border")`.
    Patches come in the order of `frame_indices`.
    """
    frame = frame_indices(rows, columns, merge, 0)
    row_taps, row_weights = (part[frame.rows_P] for part in _axis_taps(rows, side))
    column_taps, column_weights = (part[frame.columns_P] for part in _axis_taps(columns, side))
    taps = row_taps[:, :, None] * side + column_taps[:, None, :]
    weights = row_weights[:, :, None] * column_weights[:, None, :]
    return taps.reshape(-1, 16).astype(np.int32), weights.reshape(-1, 16)


def _axis_taps(size: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Four taps and weights for each of `size` coordinates on a table of `side` entries; float32."""
    source = (np.arange(size, dtype=np.float32) + np.float32(0.5)) * np.float32(side) / np.float32(size)
    source -= np.float32(0.5)
    floor = np.floor(source)
    taps = floor.astype(np.int64)[:, None] + np.arange(-1, 3)
    distance = np.abs(source[:, None] - taps.astype(np.float32))
    near = ((CUBIC + 2) * distance - (CUBIC + 3)) * distance * distance + 1
    far = ((CUBIC * distance - 5 * CUBIC) * distance + 8 * CUBIC) * distance - 4 * CUBIC
    weights = np.where(distance <= 1, near, far)
    return taps.clip(0, side - 1), weights.astype(np.float32)
