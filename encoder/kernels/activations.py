"""Activations of the packed towers that a GEMM's epilogue does not have, one pass over memory each."""

# Shapes: P rows (patches), M MLP width.

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F

from encoder.kernels.dispatch import runs_on_triton

Gelu = Literal["exact", "quick"]
"""`exact`: x Phi(x), by the error function. `quick`: x sigmoid(1.702 x)."""


def swiglu(gate_up_P2M: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up`, `[P, M]`, of contiguous rows that hold the gate and then what it gates."""
    assert gate_up_P2M.is_contiguous()
    if runs_on_triton(gate_up_P2M):
        from encoder.kernels.triton_activations import launch_swiglu

        return launch_swiglu(gate_up_P2M)
    return swiglu_reference(gate_up_P2M)


def gelu_(x_PM: torch.Tensor, kind: Gelu) -> torch.Tensor:
    """GELU in place; returns x."""
    assert x_PM.is_contiguous()
    if runs_on_triton(x_PM):
        from encoder.kernels.triton_activations import launch_gelu

        return launch_gelu(x_PM, kind)
    return x_PM.copy_(gelu_reference(x_PM, kind))


def swiglu_reference(gate_up_P2M: torch.Tensor) -> torch.Tensor:
    gate_PM, up_PM = gate_up_P2M.float().chunk(2, dim=1)
    return (F.silu(gate_PM) * up_PM).to(gate_up_P2M.dtype)


def gelu_reference(x_PM: torch.Tensor, kind: Gelu) -> torch.Tensor:
    wide_PM = x_PM.float()
    return (F.gelu(wide_PM) if kind == "exact" else wide_PM * torch.sigmoid(1.702 * wide_PM)).to(x_PM.dtype)
