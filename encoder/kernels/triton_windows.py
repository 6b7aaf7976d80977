"""Triton kernel behind `windows.py`: one program a window and head, all of it in registers.

The two halves of a head are loaded apart, for the rotary positions exchange them: scores are the sum of two products,
and so are the columns of the result. Halves that are no power of two are padded; the memory is the limit, not the
products. Programs walk the windows in strides, so that a buffer with room for many costs nothing when it holds few.
"""

# Shapes: P rows (patches), W windows, H heads, K head width, E = H x K.

from __future__ import annotations

import torch
import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
WINDOW = 64
PROGRAMS = 2048  # at most, of each head


def launch_window_attention(
    qkv_P3E: torch.Tensor, cu_windows: torch.Tensor, cos_PK2: torch.Tensor, sin_PK2: torch.Tensor, num_heads: int
) -> torch.Tensor:
    num_rows, half = cos_PK2.shape
    out_PE = torch.empty(num_rows, num_heads * 2 * half, dtype=qkv_P3E.dtype, device=qkv_P3E.device)
    num_windows = cu_windows.shape[0] - 1
    if num_rows and num_windows:
        # As many programs as there are whole windows in these rows, and half as many again for partial ones.
        programs = min(num_windows, PROGRAMS, num_rows * 3 // (2 * WINDOW) + 1)
        _window_kernel[(num_heads, programs)](
            qkv_P3E, cu_windows, cos_PK2, sin_PK2, out_PE, num_windows, (2 * half) ** -0.5 * LOG2_E,
            WIDTH=num_heads * 2 * half, HALF=half, BLOCK=max(16, triton.next_power_of_2(half)), WINDOW=WINDOW,
            num_warps=4,
        )  # fmt: skip
    return out_PE


@triton.jit
def _window_kernel(
    qkv_ptr, cu_ptr, cos_ptr, sin_ptr, out_ptr, num_windows, scale,
    WIDTH: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) * (2 * HALF)
    window = tl.program_id(1)
    num_rows = tl.load(cu_ptr + num_windows)
    begin = tl.load(cu_ptr + window)
    while begin < num_rows:  # windows behind the last one are empty and begin where the rows end
        end = tl.load(cu_ptr + window + 1)
        if begin < end:
            row = begin.to(tl.int64) + tl.arange(0, WINDOW)[:, None]
            column = tl.arange(0, BLOCK)[None, :]
            keep = (row < end) & (column < HALF)
            cos = tl.load(cos_ptr + row * HALF + column, mask=keep, other=0.0)
            sin = tl.load(sin_ptr + row * HALF + column, mask=keep, other=0.0)
            place = qkv_ptr + row * (3 * WIDTH) + head + column
            q0, q1 = _turned(place, cos, sin, keep, HALF)
            k0, k1 = _turned(place + WIDTH, cos, sin, keep, HALF)
            scores = tl.dot(q0, tl.trans(k0))
            scores = tl.dot(q1, tl.trans(k1), scores) * scale
            scores = tl.where(tl.arange(0, WINDOW)[None, :] < end - begin, scores, -float("inf"))
            weights = tl.exp2(scores - tl.max(scores, 1)[:, None])
            inverse = 1.0 / tl.sum(weights, 1)
            v0 = tl.load(place + 2 * WIDTH, mask=keep, other=0.0)
            v1 = tl.load(place + 2 * WIDTH + HALF, mask=keep, other=0.0)
            weights = weights.to(v0.dtype)
            out = out_ptr + row * WIDTH + head + column
            element = out_ptr.dtype.element_ty
            tl.store(out, (tl.dot(weights, v0) * inverse[:, None]).to(element), mask=keep)
            tl.store(out + HALF, (tl.dot(weights, v1) * inverse[:, None]).to(element), mask=keep)
        window += tl.num_programs(1)
        begin = num_rows
        if window < num_windows:
            begin = tl.load(cu_ptr + window)


@triton.jit
def _turned(place, cos, sin, keep, HALF: tl.constexpr):
    """Both halves of a head's rows, rotated and rounded to their dtype."""
    first = tl.load(place, mask=keep, other=0.0)
    second = tl.load(place + HALF, mask=keep, other=0.0)
    wide0, wide1 = first.to(tl.float32), second.to(tl.float32)
    return (wide0 * cos - wide1 * sin).to(first.dtype), (wide1 * cos + wide0 * sin).to(first.dtype)
