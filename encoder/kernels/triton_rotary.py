"""Triton kernel behind `rotary.py`: one program turns the queries and keys of all heads of a few rows, in place."""

# Shapes: P rows (patches), E width = heads x K, K head width.

from __future__ import annotations

import torch
import triton
import triton.language as tl

ROWS = 2  # of one program
HEADS = 4  # of one step


def launch_rotate(qkv_P3E: torch.Tensor, cos_PK2: torch.Tensor, sin_PK2: torch.Tensor, num_heads: int) -> torch.Tensor:
    num_rows, half = cos_PK2.shape
    if num_rows:
        _rotate_kernel[(triton.cdiv(num_rows, ROWS), triton.cdiv(2 * num_heads, HEADS))](
            qkv_P3E, cos_PK2, sin_PK2, num_rows, 2 * num_heads, cos_PK2.stride(0),
            STRIDE=qkv_P3E.shape[1], HALF=half, BLOCK=triton.next_power_of_2(half), ROWS=ROWS, HEADS=HEADS, num_warps=4,
        )  # fmt: skip
    return qkv_P3E


@triton.jit
def _rotate_kernel(
    qkv_ptr, cos_ptr, sin_ptr, num_rows, num_heads, angle_stride,
    STRIDE: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    # Keys lie right behind the queries, so both are `num_heads` heads of one kind here.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None, None]
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[None, :, None]
    column = tl.arange(0, BLOCK)[None, None, :]
    in_angles = (row < num_rows) & (column < HALF)
    keep = in_angles & (head < num_heads)
    cos = tl.load(cos_ptr + row * angle_stride + column, mask=in_angles, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + row * angle_stride + column, mask=in_angles, other=0.0).to(tl.float32)
    place = qkv_ptr + row * STRIDE + head * (2 * HALF) + column
    first = tl.load(place, mask=keep, other=0.0).to(tl.float32)
    second = tl.load(place + HALF, mask=keep, other=0.0).to(tl.float32)
    element = qkv_ptr.dtype.element_ty
    tl.store(place, (first * cos - second * sin).to(element), mask=keep)
    tl.store(place + HALF, (second * cos + first * sin).to(element), mask=keep)
