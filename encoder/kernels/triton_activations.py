"""Triton kernels behind `activations.py`: the memory is their limit."""

# Shapes: P rows (patches), M MLP width.

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024


def launch_swiglu(gate_up_P2M: torch.Tensor) -> torch.Tensor:
    num_rows, width = gate_up_P2M.shape[0], gate_up_P2M.shape[1] // 2
    out_PM = torch.empty(num_rows, width, dtype=gate_up_P2M.dtype, device=gate_up_P2M.device)
    if num_rows:
        _swiglu_kernel[(num_rows, triton.cdiv(width, BLOCK))](
            gate_up_P2M, out_PM, WIDTH=width, BLOCK=BLOCK, num_warps=4
        )
    return out_PM


def launch_gelu(x_PM: torch.Tensor, kind: str) -> torch.Tensor:
    num_values = x_PM.numel()
    if num_values:
        _gelu_kernel[(triton.cdiv(num_values, BLOCK),)](
            x_PM, num_values, EXACT=kind == "exact", BLOCK=BLOCK, num_warps=4
        )
    return x_PM


@triton.jit
def _swiglu_kernel(gate_up_ptr, out_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keep = column < WIDTH
    gate = tl.load(gate_up_ptr + row * (2 * WIDTH) + column, mask=keep, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * (2 * WIDTH) + WIDTH + column, mask=keep, other=0.0).to(tl.float32)
    value = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + row * WIDTH + column, value.to(out_ptr.dtype.element_ty), mask=keep)


@triton.jit
def _gelu_kernel(x_ptr, num_values, EXACT: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    keep = place < num_values
    x = tl.load(x_ptr + place, mask=keep, other=0.0).to(tl.float32)
    share = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476) if EXACT else tl.sigmoid(1.702 * x)
    tl.store(x_ptr + place, (x * share).to(x_ptr.dtype.element_ty), mask=keep)
