"""Triton kernels behind `fp8.py`; all move their rows once, so the memory is their limit."""

# Shapes: P rows (patches), D width.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from encoder.kernels.triton_norms import num_warps_for
from encoder.kernels.triton_widths import split_width

ROWS, BLOCK = 8, 512  # of one program of `_quantise_kernel`


def launch_quantise(x_PD: torch.Tensor, factor: float, *, gelu: bool, mean_D: torch.Tensor | None) -> torch.Tensor:
    assert x_PD.is_contiguous()
    num_rows, width = x_PD.shape
    values_PD = torch.empty(x_PD.shape, dtype=torch.float8_e4m3fn, device=x_PD.device)
    if num_rows:
        _quantise_kernel[(triton.cdiv(width, BLOCK), triton.cdiv(num_rows, ROWS))](
            x_PD, values_PD, values_PD if mean_D is None else mean_D, factor, num_rows,
            WIDTH=width, GELU=gelu, CENTRE=mean_D is not None, ROWS=ROWS, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    return values_PD


def launch_norm_8(x_PD: torch.Tensor, weight_D: torch.Tensor, bias_D: torch.Tensor, eps: float) -> torch.Tensor:
    assert x_PD.is_contiguous()
    num_rows, width = x_PD.shape
    values_PD = torch.empty(x_PD.shape, dtype=torch.float8_e4m3fn, device=x_PD.device)
    if num_rows:
        _norm_8_kernel[(num_rows,)](
            x_PD, x_PD, x_PD, weight_D, bias_D, x_PD, values_PD, eps,
            WIDTH=width, **split_width(width), ADD=False, num_warps=num_warps_for(width),
        )  # fmt: skip
    return values_PD


def launch_add_norm_8(
    x_PD: torch.Tensor,
    delta_PD: torch.Tensor,
    weight_D: torch.Tensor,
    bias_D: torch.Tensor,
    eps: float,
    delta_bias_D: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    assert x_PD.is_contiguous()
    assert delta_PD.is_contiguous()
    num_rows, width = x_PD.shape
    total_PD = torch.empty_like(x_PD)
    values_PD = torch.empty(x_PD.shape, dtype=torch.float8_e4m3fn, device=x_PD.device)
    if num_rows:
        _norm_8_kernel[(num_rows,)](
            x_PD, delta_PD, delta_bias_D, weight_D, bias_D, total_PD, values_PD, eps,
            WIDTH=width, **split_width(width), ADD=True, num_warps=num_warps_for(width),
        )  # fmt: skip
    return total_PD, values_PD


@triton.jit
def _store_8(values_ptr, place, inside, x):
    tl.store(values_ptr + place, tl.minimum(tl.maximum(x, -448.0), 448.0).to(tl.float8e4nv), mask=inside)


@triton.jit
def _quantise_kernel(
    x_ptr, values_ptr, mean_ptr, factor, num_rows,
    WIDTH: tl.constexpr, GELU: tl.constexpr, CENTRE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (row < num_rows) & (column < WIDTH)
    x = tl.load(x_ptr + row * WIDTH + column, mask=inside, other=0).to(tl.float32)
    if GELU:
        inner = x * (0.7978845608028654 + 0.035677408136300125 * x * x)
        # One instruction of 11 bits, where e4m3 keeps 4; an exact tanh would take longer than reading the rows.
        tanh = tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [inner], dtype=tl.float32, is_pure=True, pack=1
        )
        x = 0.5 * x * (1.0 + tanh)
    if CENTRE:
        x -= tl.load(mean_ptr + column, mask=column < WIDTH, other=0).to(tl.float32)
    _store_8(values_ptr, row * WIDTH + column, inside, x * factor)


@triton.jit
def _norm_8_kernel(
    x_ptr, delta_ptr, delta_bias_ptr, weight_ptr, bias_ptr, total_ptr, values_ptr, eps,
    WIDTH: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEAD)
    tail = HEAD + tl.arange(0, TAIL if TAIL > 0 else 1)  # an empty tail lies beyond the row
    in_head = head < WIDTH
    in_tail = tail < WIDTH
    start = row * WIDTH
    x0 = tl.load(x_ptr + start + head, mask=in_head, other=0).to(tl.float32)
    x1 = tl.load(x_ptr + start + tail, mask=in_tail, other=0).to(tl.float32)
    if ADD:
        x0 += tl.load(delta_ptr + start + head, mask=in_head, other=0).to(tl.float32)
        x1 += tl.load(delta_ptr + start + tail, mask=in_tail, other=0).to(tl.float32)
        x0 += tl.load(delta_bias_ptr + head, mask=in_head, other=0).to(tl.float32)
        x1 += tl.load(delta_bias_ptr + tail, mask=in_tail, other=0).to(tl.float32)
        tl.store(total_ptr + start + head, x0.to(total_ptr.dtype.element_ty), mask=in_head)
        tl.store(total_ptr + start + tail, x1.to(total_ptr.dtype.element_ty), mask=in_tail)
    mean = (tl.sum(x0, 0) + tl.sum(x1, 0)) / WIDTH
    x0 = tl.where(in_head, x0 - mean, 0.0)
    x1 = tl.where(in_tail, x1 - mean, 0.0)
    inverse_std = 1.0 / tl.sqrt((tl.sum(x0 * x0, 0) + tl.sum(x1 * x1, 0)) / WIDTH + eps)
    weight0 = tl.load(weight_ptr + head, mask=in_head, other=0).to(tl.float32)
    weight1 = tl.load(weight_ptr + tail, mask=in_tail, other=0).to(tl.float32)
    y0 = x0 * inverse_std * weight0 + tl.load(bias_ptr + head, mask=in_head, other=0).to(tl.float32)
    y1 = x1 * inverse_std * weight1 + tl.load(bias_ptr + tail, mask=in_tail, other=0).to(tl.float32)
    _store_8(values_ptr, start + head, in_head, y0)
    _store_8(values_ptr, start + tail, in_tail, y1)
