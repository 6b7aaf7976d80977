"""Where each patch of a MiniCPM-V slice is: integers that depend on the slice's grid alone, made on the CPU."""

# Shapes: P patches of a slice.

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from encoder.adapters.array_cache import cached_arrays
from encoder.types import Grid

Indices = npt.NDArray[np.int32]


@cached_arrays
def patch_indices(grid: Grid, table_side: int, one_row: bool) -> tuple[Indices, Indices, Indices]:
    """Position ids, rows and columns of the patches of a slice, or of a group's frames, int32 `[P]` each."""
    num_frames, num_rows, num_columns = grid
    rows, columns = np.divmod(np.arange(num_rows * num_columns, dtype=np.int32), np.int32(num_columns))
    ids = position_ids(num_rows, num_columns, table_side, one_row=one_row)
    return np.tile(ids, num_frames), np.tile(rows, num_frames), np.tile(columns, num_frames)


def position_ids(rows: int, columns: int, table_side: int = 70, *, one_row: bool = False) -> Indices:
    """Row of the tower's position table for each patch, int32 `[rows * columns]`.

    `one_row` is the rule of 2.5, whose released tower sees a slice as a single row of patches.
    """
    if one_row:
        return _buckets(rows * columns, table_side)
    ids: Indices = table_side * _buckets(rows, table_side)[:, None] + _buckets(columns, table_side)
    return ids.ravel()


@lru_cache(maxsize=4096)
def _buckets(count: int, table_side: int) -> Indices:
    """Which of the table's buckets each of `count` equal steps of [0, 1) falls into.

    In float32, product and all, as released: 14 of 25 steps times 70 is not always an integer there.
    """
    boundaries = np.arange(1 / table_side, 1.0, 1 / table_side).astype(np.float32)
    steps = np.arange(count, dtype=np.float32) * np.float32(1 / count)
    steps = np.minimum(steps, np.float32(1 - 1e-6))
    buckets: Indices = np.searchsorted(boundaries, steps, side="right").astype(np.int32)
    return buckets
