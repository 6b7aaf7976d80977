"""Triton kernels behind `gather.py`: one program adds to one stretch of one row, so memory is its limit."""

# Shapes: P rows (patches), E width, N rows of a table.

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024


def launch_add_table_rows(
    x_PE: torch.Tensor,
    first_NE: torch.Tensor,
    first_ids_P: torch.Tensor,
    second_NE: torch.Tensor,
    second_ids_P: torch.Tensor,
) -> torch.Tensor:
    assert first_NE.is_contiguous()
    assert second_NE.is_contiguous()
    num_rows, width = x_PE.shape
    if num_rows:
        _add_table_rows_kernel[(num_rows, triton.cdiv(width, BLOCK))](
            x_PE, first_NE, first_ids_P, second_NE, second_ids_P, x_PE.stride(0),
            WIDTH=width, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    return x_PE


def launch_add_weighted_rows(
    x_PE: torch.Tensor, table_NE: torch.Tensor, ids_PJ: torch.Tensor, weights_PJ: torch.Tensor
) -> torch.Tensor:
    assert table_NE.is_contiguous()
    num_rows, width = x_PE.shape
    if num_rows:
        _add_weighted_rows_kernel[(num_rows, triton.cdiv(width, BLOCK))](
            x_PE, table_NE, ids_PJ, weights_PJ,
            WIDTH=width, TAPS=ids_PJ.shape[1], BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    return x_PE


@triton.jit
def _add_table_rows_kernel(
    x_ptr, first_ptr, first_ids_ptr, second_ptr, second_ids_ptr, x_stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    first = tl.load(first_ids_ptr + row).to(tl.int64) * WIDTH
    second = tl.load(second_ids_ptr + row).to(tl.int64) * WIDTH
    place = x_ptr + row * x_stride + column
    total = tl.load(place, mask=inside, other=0).to(tl.float32)
    total += tl.load(first_ptr + first + column, mask=inside, other=0).to(tl.float32)
    total += tl.load(second_ptr + second + column, mask=inside, other=0).to(tl.float32)
    tl.store(place, total.to(x_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _add_weighted_rows_kernel(
    x_ptr, table_ptr, ids_ptr, weights_ptr,
    WIDTH: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    place = x_ptr + row * WIDTH + column
    total = tl.load(place, mask=inside, other=0).to(tl.float32)
    for tap in tl.static_range(TAPS):
        source = tl.load(ids_ptr + row * TAPS + tap).to(tl.int64) * WIDTH
        weight = tl.load(weights_ptr + row * TAPS + tap)
        total += weight * tl.load(table_ptr + source + column, mask=inside, other=0).to(tl.float32)
    tl.store(place, total.to(x_ptr.dtype.element_ty), mask=inside)
