"""Triton kernels behind `norms.py`: one program a row, the row split into a power of two and a remainder.

1152 = 1024 + 128 needs no masked lanes, where one block of 2048 would idle 44 % of them. The kernels move each row
once, so the memory is their limit.
"""

# Shapes: P rows (patches), D model width.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from encoder.kernels.triton_widths import split_width


def launch_norm(
    x_PD: torch.Tensor, weight_D: torch.Tensor, bias_D: torch.Tensor | None, eps: float, *, center: bool
) -> torch.Tensor:
    assert x_PD.is_contiguous()
    num_rows, width = x_PD.shape
    normed_PD = torch.empty_like(x_PD)
    if num_rows:
        _norm_kernel[(num_rows,)](
            x_PD, x_PD, x_PD, x_PD, weight_D, weight_D if bias_D is None else bias_D, x_PD, normed_PD, eps,
            WIDTH=width, **split_width(width), ADD=False, TWO_PARTS=False, DELTA_BIAS=False, GATHER=False,
            BIAS=bias_D is not None, CENTER=center, num_warps=num_warps_for(width),
        )  # fmt: skip
    return normed_PD


def launch_add_norm(
    x_PD: torch.Tensor,
    delta_PD: torch.Tensor,
    weight_D: torch.Tensor,
    bias_D: torch.Tensor | None,
    eps: float,
    delta_bias_D: torch.Tensor | None,
    rows_P: torch.Tensor | None,
    *,
    center: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    assert x_PD.is_contiguous()
    assert delta_PD.is_contiguous()
    assert rows_P is not None or delta_PD.shape in (x_PD.shape, (2, *x_PD.shape))
    num_rows, width = x_PD.shape
    total_PD, normed_PD = torch.empty_like(x_PD), torch.empty_like(x_PD)
    if num_rows:
        _norm_kernel[(num_rows,)](
            x_PD, delta_PD, weight_D if delta_bias_D is None else delta_bias_D, x_PD if rows_P is None else rows_P,
            weight_D, weight_D if bias_D is None else bias_D, total_PD, normed_PD, eps,
            WIDTH=width, **split_width(width), ADD=True, TWO_PARTS=delta_PD.dim() == 3,
            DELTA_BIAS=delta_bias_D is not None, GATHER=rows_P is not None, BIAS=bias_D is not None, CENTER=center,
            num_warps=num_warps_for(width),
        )  # fmt: skip
    return total_PD, normed_PD


def num_warps_for(width: int) -> int:
    """A 16-byte access a lane and array: 512 to 1024 columns a warp keep several loads in flight."""
    return 1 if width <= 512 else 2 if width <= 1536 else 4 if width <= 4096 else 8


@triton.jit
def _norm_kernel(
    x_ptr, delta_ptr, delta_bias_ptr, rows_ptr, weight_ptr, bias_ptr, total_ptr, normed_ptr, eps,
    WIDTH: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr, ADD: tl.constexpr, TWO_PARTS: tl.constexpr,
    DELTA_BIAS: tl.constexpr, GATHER: tl.constexpr, BIAS: tl.constexpr, CENTER: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEAD)
    tail = HEAD + tl.arange(0, TAIL if TAIL > 0 else 1)
    # A head wider than the row happens only for a row that is one padded power of two.
    in_head = head < WIDTH
    in_tail = tail < WIDTH
    source = tl.load(rows_ptr + row).to(tl.int64) if GATHER else row

    a = _load_sum(x_ptr, delta_ptr, delta_bias_ptr, row, source, head, in_head, WIDTH, ADD, TWO_PARTS, DELTA_BIAS)
    if ADD:
        tl.store(total_ptr + row * WIDTH + head, a.to(total_ptr.dtype.element_ty), mask=in_head)
    mean = tl.sum(a, 0) if CENTER else 0.0
    if TAIL > 0:
        b = _load_sum(x_ptr, delta_ptr, delta_bias_ptr, row, source, tail, in_tail, WIDTH, ADD, TWO_PARTS, DELTA_BIAS)
        if ADD:
            tl.store(total_ptr + row * WIDTH + tail, b.to(total_ptr.dtype.element_ty), mask=in_tail)
        if CENTER:
            mean += tl.sum(b, 0)
    mean = mean / WIDTH
    a = tl.where(in_head, a - mean, 0.0)
    squares = tl.sum(a * a, 0)
    if TAIL > 0:
        b = tl.where(in_tail, b - mean, 0.0)
        squares += tl.sum(b * b, 0)
    scale = 1.0 / tl.sqrt(squares / WIDTH + eps)
    _store_normed(normed_ptr, weight_ptr, bias_ptr, a * scale, row, head, in_head, WIDTH, BIAS)
    if TAIL > 0:
        _store_normed(normed_ptr, weight_ptr, bias_ptr, b * scale, row, tail, in_tail, WIDTH, BIAS)


@triton.jit
def _load_sum(
    x_ptr, delta_ptr, delta_bias_ptr, row, source, column, mask,
    WIDTH: tl.constexpr, ADD: tl.constexpr, TWO_PARTS: tl.constexpr, DELTA_BIAS: tl.constexpr,
):  # fmt: skip
    value = tl.load(x_ptr + row * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(delta_ptr + source * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
    if TWO_PARTS:
        second = source + tl.num_programs(0)
        value += tl.load(delta_ptr + second * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
    if DELTA_BIAS:
        value += tl.load(delta_bias_ptr + column, mask=mask, other=0.0).to(tl.float32)
    return value


@triton.jit
def _store_normed(normed_ptr, weight_ptr, bias_ptr, scaled, row, column, mask, WIDTH: tl.constexpr, BIAS: tl.constexpr):
    value = scaled * tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    if BIAS:
        value += tl.load(bias_ptr + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(normed_ptr + row * WIDTH + column, value.to(normed_ptr.dtype.element_ty), mask=mask)
