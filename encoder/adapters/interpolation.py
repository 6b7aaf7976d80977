"""How a square table of position embeddings is read at a grid of patches: table rows and weights for each patch."""

# Shapes: P patches of a frame, J taps of each.

from __future__ import annotations

import numpy as np

from encoder.adapters.array_cache import cached_arrays

CUBIC = -0.75
"""Parameter of Keys' convolution kernel, as torch interpolates bicubically."""

Taps = tuple[np.ndarray, np.ndarray]


@cached_arrays
def bilinear_taps(rows: int, columns: int, merge: int, side: int) -> Taps:
    """Bilinear with corners aligned: four table rows (int32 `[P, 4]`) and their weights (float32 `[P, 4]`).

    Patches come in the order of `frame_indices` without windows.
    """
    return _in_order(merge, side, _linear_taps(rows, side), _linear_taps(columns, side))


@cached_arrays
def bicubic_taps(rows: int, columns: int, merge: int, side: int) -> Taps:
    """Bicubic with corners not aligned: sixteen table rows (int32 `[P, 16]`) and their weights (float32 `[P, 16]`).

    Taps beyond the table stand for its border, as in `F.interpolate` and in `F.grid_sample(padding_mode="border")`.
    Patches come in the order of `frame_indices` without windows.
    """
    return _in_order(merge, side, _cubic_taps(rows, side), _cubic_taps(columns, side))


def _in_order(merge: int, side: int, of_rows: Taps, of_columns: Taps) -> Taps:
    """Each row's taps with each column's, square by square of a token's patches."""
    (row_taps, row_weights), (column_taps, column_weights) = of_rows, of_columns
    grids = (
        row_taps[:, None, :, None] * side + column_taps[:, None],
        row_weights[:, None, :, None] * column_weights[:, None],
    )
    rows, columns, *_ = grids[0].shape
    taps_PJ, weights_PJ = (
        grid.reshape(rows // merge, merge, columns // merge, merge, -1).swapaxes(1, 2).reshape(rows * columns, -1)
        for grid in grids
    )
    return taps_PJ, weights_PJ


def _linear_taps(size: int, side: int) -> Taps:
    """Two taps and weights for each of `size` coordinates on a table of `side` entries; float32 as in the reference."""
    source = np.arange(size, dtype=np.float32) * (side - 1) / np.float32(max(size - 1, 1))
    floor = np.floor(source)
    raw_taps = floor.astype(np.int64)[:, None] + np.arange(2)
    distance = np.abs(source[:, None] - floor[:, None] - np.arange(2, dtype=np.float32))
    return raw_taps.clip(0, side - 1).astype(np.int32), (1 - distance).clip(min=0).astype(np.float32)


def _cubic_taps(size: int, side: int) -> Taps:
    """Four taps and weights for each of `size` coordinates on a table of `side` entries; float32."""
    source = (np.arange(size, dtype=np.float32) + np.float32(0.5)) * np.float32(side) / np.float32(size)
    source -= np.float32(0.5)
    floor = np.floor(source)
    taps = floor.astype(np.int64)[:, None] + np.arange(-1, 3)
    distance = np.abs(source[:, None] - taps.astype(np.float32))
    near = ((CUBIC + 2) * distance - (CUBIC + 3)) * distance * distance + 1
    far = ((CUBIC * distance - 5 * CUBIC) * distance + 8 * CUBIC) * distance - 4 * CUBIC
    weights = np.where(distance <= 1, near, far)
    return taps.clip(0, side - 1).astype(np.int32), weights.astype(np.float32)
