"""Attention within small windows, with the rotary positions of queries and keys applied on the way.

A window is one block of work: its rows are read once, turned, and attended to in registers. So a layer of windows
costs one pass over its projections, where rotating and attending apart would take two.
"""

# Shapes: P rows (patches), W windows, H heads, K head width, E = H x K.

from __future__ import annotations

import torch

from encoder.kernels.attention import check_offsets, ragged_attention_reference
from encoder.kernels.dispatch import runs_on_triton
from encoder.kernels.rotary import rotate_

MAX_WINDOW = 64
"""Rows that a window may have."""


def window_attention(
    qkv_P3E: torch.Tensor, cu_windows: torch.Tensor, cos_PK2: torch.Tensor, sin_PK2: torch.Tensor, num_heads: int
) -> torch.Tensor:
    """Self-attention within each window of at most `MAX_WINDOW` rows, `[P, E]`; `qkv_P3E` is used up.

    `cu_windows` is int32 `[W + 1]`, non-decreasing from 0; repeated offsets are empty windows, rows after the last one
    are padding: never read, and undefined in the result.
    """
    check_offsets(cu_windows)
    assert qkv_P3E.is_contiguous()
    if runs_on_triton(qkv_P3E):
        from encoder.kernels.triton_windows import launch_window_attention

        return launch_window_attention(qkv_P3E, cu_windows, cos_PK2, sin_PK2, num_heads)
    rotated = rotate_(qkv_P3E, cos_PK2, sin_PK2, num_heads)
    out_PE = rotated.new_zeros(len(rotated), rotated.shape[1] // 3)
    return ragged_attention_reference(rotated, cu_windows, num_heads, out=out_PE)
