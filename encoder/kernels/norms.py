"""LayerNorm and the fused residual add + LayerNorm of the packed towers.

Statistics are taken in float32 over the row as read; the residual stream is rounded to its dtype on the way out, the
normed row is computed from the unrounded sum.
"""

# Shapes: P rows (patches), D model width, R rows of a table.

from __future__ import annotations

import torch
import torch.nn.functional as F

from encoder.kernels.dispatch import runs_on_triton


def layer_norm(x_PD: torch.Tensor, weight_D: torch.Tensor, bias_D: torch.Tensor | None, eps: float) -> torch.Tensor:
    """LayerNorm over the last dimension of contiguous `x_PD`."""
    if runs_on_triton(x_PD):
        from encoder.kernels.triton_norms import launch_norm

        return launch_norm(x_PD, weight_D, bias_D, eps, center=True)
    return layer_norm_reference(x_PD, weight_D, bias_D, eps)


def rms_norm(x_PD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last dimension of contiguous `x_PD`."""
    if runs_on_triton(x_PD):
        from encoder.kernels.triton_norms import launch_norm

        return launch_norm(x_PD, weight_D, None, eps, center=False)
    return rms_norm_reference(x_PD, weight_D, eps)


def add_layer_norm(
    x_PD: torch.Tensor,
    delta_PD: torch.Tensor,
    weight_D: torch.Tensor,
    bias_D: torch.Tensor | None,
    eps: float,
    *,
    delta_bias_D: torch.Tensor | None = None,
    rows_P: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(x + delta, layer_norm(x + delta))` in one pass over memory.

    `delta_bias_D` is added to the sum as well: the bias of the GEMM that made `delta`, at no cost. `delta_PD` may be
    two parts of a sum, `[2, P, D]`: of a GEMM that was split.
    With `rows_P` (int32 or int64), `delta_PD` is a table `[R, D]` and row p adds `table[rows_P[p]]`: position
    embeddings.
    """
    if runs_on_triton(x_PD):
        from encoder.kernels.triton_norms import launch_add_norm

        return launch_add_norm(x_PD, delta_PD, weight_D, bias_D, eps, delta_bias_D, rows_P, center=True)
    return add_layer_norm_reference(x_PD, delta_PD, weight_D, bias_D, eps, delta_bias_D=delta_bias_D, rows_P=rows_P)


def add_rms_norm(
    x_PD: torch.Tensor,
    delta_PD: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    *,
    delta_bias_D: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(x + delta, rms_norm(x + delta))` in one pass over memory; `delta_bias_D` as in `add_layer_norm`."""
    if runs_on_triton(x_PD):
        from encoder.kernels.triton_norms import launch_add_norm

        return launch_add_norm(x_PD, delta_PD, weight_D, None, eps, delta_bias_D, None, center=False)
    total_PD = residual_sum(x_PD, delta_PD, delta_bias_D, None)
    return total_PD.to(x_PD.dtype), rms_norm_reference(total_PD, weight_D, eps).to(x_PD.dtype)


def layer_norm_reference(
    x_PD: torch.Tensor, weight_D: torch.Tensor, bias_D: torch.Tensor | None, eps: float
) -> torch.Tensor:
    bias_float_D = None if bias_D is None else bias_D.float()
    normed_PD = F.layer_norm(x_PD.float(), weight_D.shape, weight_D.float(), bias_float_D, eps)
    return normed_PD.to(x_PD.dtype)


def rms_norm_reference(x_PD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    wide_PD = x_PD.float()
    scale_P1 = torch.rsqrt(wide_PD.square().mean(dim=-1, keepdim=True) + eps)
    return (wide_PD * scale_P1 * weight_D.float()).to(x_PD.dtype)


def add_layer_norm_reference(
    x_PD: torch.Tensor,
    delta_PD: torch.Tensor,
    weight_D: torch.Tensor,
    bias_D: torch.Tensor | None,
    eps: float,
    *,
    delta_bias_D: torch.Tensor | None = None,
    rows_P: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    total_PD = residual_sum(x_PD, delta_PD, delta_bias_D, rows_P)
    return total_PD.to(x_PD.dtype), layer_norm_reference(total_PD, weight_D, bias_D, eps).to(x_PD.dtype)


def residual_sum(
    x_PD: torch.Tensor,
    delta_PD: torch.Tensor,
    delta_bias_D: torch.Tensor | None,
    rows_P: torch.Tensor | None,
) -> torch.Tensor:
    """The new residual stream in float32."""
    delta_PD = delta_PD.float().sum(0) if delta_PD.dim() == 3 else delta_PD
    total_PD = x_PD.float() + (delta_PD if rows_P is None else delta_PD[rows_P]).float()
    return total_PD if delta_bias_D is None else total_PD + delta_bias_D.float()
