"""Where the patches of a frame lie: everything that a grid of patches determines, for families whose tokens merge some.

Rows of a grid come token by token: the patches of a token follow one another, so that merging is a reshape. Tokens come
row by row of the frame, or window by window where the model has windows.
"""

# Shapes: P patches of one frame, T its tokens, W its windows.

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from encoder.adapters.array_cache import cached_arrays


class FrameIndices(NamedTuple):
    """All that a frame's grid determines."""

    rows_P: np.ndarray  # int32, of each patch
    columns_P: np.ndarray
    run_order_T: np.ndarray  # int32: the token, counted row by row, that comes at each place
    places_T: np.ndarray  # int32: the place of each token, counted row by row
    window_patches_W: np.ndarray  # int32


@cached_arrays
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
