"""Eight-bit floats for GEMMs on Hopper: rows and weights in e4m3, one scale for all rows and one for all weights.

e4m3 is a float: a value keeps its 4 bits of mantissa anywhere within 15 binades, so a scale need not fit closely.
Scales are powers of two with room above the largest value seen, and fold exactly into a norm. What exceeds the room is
clamped to the largest number.
"""

# Shapes: P rows (patches), D width, N output width of a linear layer.

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from encoder.kernels.dispatch import runs_on_triton
from encoder.kernels.norms import add_layer_norm_reference, layer_norm_reference

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
MANY_ROWS = 8192


@dataclass(frozen=True, slots=True)
class Linear8:
    """A linear layer over e4m3 rows: `rows @ weight.T * scale + bias`."""

    weight_ND: torch.Tensor  # float8_e4m3fn
    scale: torch.Tensor  # float32, one number: undoes the factors of rows and weights
    scale_1N: torch.Tensor  # the same for each column
    bias_N: torch.Tensor | None

    @classmethod
    def of(
        cls, weight_ND: torch.Tensor, weight_factor: float, rows_factor: float, bias_N: torch.Tensor | None = None
    ) -> Linear8:
        """Of weights rounded already, for rows that were multiplied by `rows_factor`."""
        scale = torch.tensor(1 / (weight_factor * rows_factor), dtype=torch.float32, device=weight_ND.device)
        return cls(weight_ND, scale, scale.expand(1, len(weight_ND)).contiguous(), bias_N)

    def __call__(self, rows_PD: torch.Tensor, ones_P1: torch.Tensor) -> torch.Tensor:
        """`[P, N]` in bfloat16 (on a CPU in float32). `ones_P1` is float32: a scale a row for kernels that want one."""
        if not rows_PD.is_cuda:
            return F.linear(rows_PD.float(), self.weight_ND.float() * self.scale, self.bias_N)
        # Two kernels: scales a row (CUTLASS) win for many rows and wide outputs, one scale (cuBLASLt) elsewhere.
        width, depth = self.weight_ND.shape
        by_row = len(rows_PD) >= MANY_ROWS and width >= depth
        return torch._scaled_mm(
            rows_PD,
            self.weight_ND.t(),
            scale_a=ones_P1 if by_row else ones_P1[0, 0],
            scale_b=self.scale_1N if by_row else self.scale,
            bias=self.bias_N,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )


def factor_for(largest: float) -> float:
    """The power of two that takes twice this magnitude to 448 at most."""
    return 2.0 ** math.floor(math.log2(LARGEST / (max(largest, 1e-12) * 2)))


def round_8(x: torch.Tensor) -> torch.Tensor:
    """Nearest e4m3 numbers, the largest for what exceeds it."""
    return x.clamp(-LARGEST, LARGEST).to(E4M3)


def quantise_rows(
    x_PD: torch.Tensor, factor: float, *, gelu: bool = False, mean_D: torch.Tensor | None = None
) -> torch.Tensor:
    """`factor` times the rows, in e4m3; before that GELU (tanh form) if asked for, then less `mean_D`."""
    if runs_on_triton(x_PD):
        from encoder.kernels.triton_fp8 import launch_quantise

        return launch_quantise(x_PD, factor, gelu=gelu, mean_D=mean_D)
    return quantise_rows_reference(x_PD, factor, gelu=gelu, mean_D=mean_D)


def layer_norm_8(x_PD: torch.Tensor, weight_D: torch.Tensor, bias_D: torch.Tensor, eps: float) -> torch.Tensor:
    """LayerNorm in e4m3; weight and bias contain the factor."""
    if runs_on_triton(x_PD):
        from encoder.kernels.triton_fp8 import launch_norm_8

        return launch_norm_8(x_PD, weight_D, bias_D, eps)
    return round_8(layer_norm_reference(x_PD.float(), weight_D, bias_D, eps))


def add_layer_norm_8(
    x_PD: torch.Tensor,
    delta_PD: torch.Tensor,
    weight_D: torch.Tensor,
    bias_D: torch.Tensor,
    eps: float,
    delta_bias_D: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`x + delta + delta_bias`, and its LayerNorm in e4m3, in one pass; weight and bias contain the factor."""
    if runs_on_triton(x_PD):
        from encoder.kernels.triton_fp8 import launch_add_norm_8

        return launch_add_norm_8(x_PD, delta_PD, weight_D, bias_D, eps, delta_bias_D)
    total_PD, normed_PD = add_layer_norm_reference(
        x_PD.float(), delta_PD, weight_D, bias_D, eps, delta_bias_D=delta_bias_D
    )
    return total_PD.to(x_PD.dtype), round_8(normed_PD)


def quantise_rows_reference(
    x_PD: torch.Tensor, factor: float, *, gelu: bool = False, mean_D: torch.Tensor | None = None
) -> torch.Tensor:
    """Twin of `quantise_rows`."""
    x_PD = F.gelu(x_PD.float(), approximate="tanh") if gelu else x_PD.float()
    return round_8((x_PD if mean_D is None else x_PD - mean_D) * factor)
