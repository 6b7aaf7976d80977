"""Eight-bit floats for GEMMs on Hopper: rows and weights in e4m3, each row with a scale of its own.

A row's largest magnitude becomes 448, the largest e4m3 number. The scale is dynamic, taken from the row itself, so a
row's result depends on that row alone, pad rows included.
"""

# Shapes: P rows (patches), D width, N output width of a linear layer.

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from encoder.kernels.dispatch import runs_on_triton
from encoder.kernels.norms import add_layer_norm_reference

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0


@dataclass(frozen=True, slots=True)
class Rows8:
    """Rows in e4m3 and what to multiply each with."""

    values_PD: torch.Tensor  # float8_e4m3fn
    scale_P1: torch.Tensor  # float32


@dataclass(frozen=True, slots=True)
class Linear8:
    """A linear layer with e4m3 weights, one scale an output column."""

    weight_ND: torch.Tensor  # float8_e4m3fn
    scale_1N: torch.Tensor  # float32
    bias_N: torch.Tensor | None

    @classmethod
    def of(cls, weight_ND: torch.Tensor, bias_N: torch.Tensor | None = None) -> Linear8:
        """Quantise released weights."""
        rows = quantise_rows_reference(weight_ND)
        return cls(rows.values_PD, rows.scale_P1.t().contiguous(), bias_N)

    def __call__(self, rows: Rows8) -> torch.Tensor:
        """`[P, N]` in bfloat16."""
        return torch._scaled_mm(
            rows.values_PD,
            self.weight_ND.t(),
            scale_a=rows.scale_P1,
            scale_b=self.scale_1N,
            bias=self.bias_N,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )


def quantise_rows(x_PD: torch.Tensor, *, gelu: bool = False, mean_D: torch.Tensor | None = None) -> Rows8:
    """Rows in e4m3 in one pass over memory; first GELU (tanh form) if asked for, then less `mean_D`."""
    if runs_on_triton(x_PD):
        from encoder.kernels.triton_fp8 import launch_quantise

        return Rows8(*launch_quantise(x_PD, gelu=gelu, mean_D=mean_D))
    return quantise_rows_reference(x_PD, gelu=gelu, mean_D=mean_D)


def add_layer_norm_8(
    x_PD: torch.Tensor,
    delta_PD: torch.Tensor,
    weight_D: torch.Tensor,
    bias_D: torch.Tensor,
    eps: float,
    delta_bias_D: torch.Tensor,
) -> tuple[torch.Tensor, Rows8]:
    """`x + delta + delta_bias`, and its LayerNorm in e4m3, in one pass over memory."""
    if runs_on_triton(x_PD):
        from encoder.kernels.triton_fp8 import launch_add_norm_quantise

        total_PD, values_PD, scale_P1 = launch_add_norm_quantise(x_PD, delta_PD, weight_D, bias_D, eps, delta_bias_D)
        return total_PD, Rows8(values_PD, scale_P1)
    total_PD, normed_PD = add_layer_norm_reference(x_PD, delta_PD, weight_D, bias_D, eps, delta_bias_D=delta_bias_D)
    return total_PD, quantise_rows_reference(normed_PD)


def quantise_rows_reference(x_PD: torch.Tensor, *, gelu: bool = False, mean_D: torch.Tensor | None = None) -> Rows8:
    """Twin of `quantise_rows`."""
    x_PD = F.gelu(x_PD.float(), approximate="tanh") if gelu else x_PD.float()
    if mean_D is not None:
        x_PD = x_PD - mean_D
    scale_P1 = x_PD.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / LARGEST
    return Rows8((x_PD / scale_P1).clamp(-LARGEST, LARGEST).to(E4M3), scale_P1)
