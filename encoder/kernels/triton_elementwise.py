"""Triton kernel behind `elementwise.py`."""

# Shapes: P patches, C bytes of one patch, W columns of the output.

from __future__ import annotations

import torch
import triton
import triton.language as tl

ROWS = 8  # of one program
BLOCK = 256  # columns of one step


def launch_patches_to_pixels(bytes_PC: torch.Tensor, out_PW: torch.Tensor) -> torch.Tensor:
    num_patches, num_bytes = bytes_PC.shape
    width = out_PW.shape[1]
    if num_patches:
        _centre_kernel[(triton.cdiv(num_patches, ROWS), triton.cdiv(width, BLOCK))](
            bytes_PC,
            out_PW,
            num_patches,
            NUM_BYTES=num_bytes,
            WIDTH=width,
            ROWS=ROWS,
            BLOCK=BLOCK,
            num_warps=4,
        )
    return out_PW


@triton.jit
def _centre_kernel(
    bytes_ptr, out_ptr, num_patches,
    NUM_BYTES: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    in_rows = row < num_patches
    value = tl.load(bytes_ptr + row * NUM_BYTES + column, mask=in_rows & (column < NUM_BYTES), other=0)
    centred = tl.where(column < NUM_BYTES, value.to(tl.float32) - 128.0, 0.0)
    tl.store(out_ptr + row * WIDTH + column, centred.to(out_ptr.dtype.element_ty), mask=in_rows & (column < WIDTH))
