"""A pre-norm vision transformer over packed rows: every row is a patch of some segment, segments lie end to end.

Only attention looks across rows, and it is passed in, so the same blocks serve packed segments and dense rectangles.
Pad rows may hold anything: nothing here mixes rows.
"""

# Shapes: P rows (patches), D model width, M MLP width.

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from encoder.attention import SelfAttention
from encoder.kernels.norms import add_layer_norm


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """Scale and shift of a LayerNorm, `[D]` each."""

    weight: Tensor
    bias: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One layer. Query, key and value projections are fused: `[3D, D]`."""

    norm1: Norm
    qkv_weight: Tensor
    qkv_bias: Tensor
    out_weight: Tensor
    out_bias: Tensor
    norm2: Norm
    fc1_weight: Tensor
    fc1_bias: Tensor
    fc2_weight: Tensor
    fc2_bias: Tensor


def run_blocks(
    x_PD: Tensor,
    positions_RD: Tensor,
    ids_P: Tensor,
    blocks: list[Block],
    post_norm: Norm,
    eps: float,
    attend: SelfAttention,
) -> Tensor:
    """Embedded patches to normed features `[P, D]`.

    Each residual add is fused with the LayerNorm that follows it, the position embedding with the first one, and the
    bias of the projection before it joins the same pass.

    Args:
        positions_RD: table of position embeddings; row p of x adds `positions_RD[ids_P[p]]`.
        attend: self-attention over the fused projections.
    """
    first = blocks[0].norm1
    x_PD, h_PD = add_layer_norm(x_PD, positions_RD, first.weight, first.bias, eps, rows_P=ids_P)
    for index, block in enumerate(blocks):
        attended_PD = attend(F.linear(h_PD, block.qkv_weight, block.qkv_bias))
        delta_PD = F.linear(attended_PD, block.out_weight)
        norm = block.norm2
        x_PD, h_PD = add_layer_norm(x_PD, delta_PD, norm.weight, norm.bias, eps, delta_bias_D=block.out_bias)
        delta_PD = linear_in_parts(linear_gelu(h_PD, block.fc1_weight, block.fc1_bias), block.fc2_weight)
        norm = blocks[index + 1].norm1 if index + 1 < len(blocks) else post_norm
        x_PD, h_PD = add_layer_norm(x_PD, delta_PD, norm.weight, norm.bias, eps, delta_bias_D=block.fc2_bias)
    return h_PD


FEW_ROWS = 1280
"""Up to so many rows, a GEMM of MLP width to model width has too few tiles for a large GPU. Halves of its depth have
twice as many: 16 us against 21 at 1,056 rows, 29 against 30 at 2,112 (H200)."""


def linear_in_parts(x_PM: Tensor, weight_DM: Tensor) -> Tensor:
    """A linear layer without bias, `[P, D]`; or, for few rows on a GPU, two parts of its sum, `[2, P, D]`."""
    num_rows, depth = x_PM.shape
    if not x_PM.is_cuda or num_rows > FEW_ROWS or depth % 16:
        return F.linear(x_PM, weight_DM)
    x_2PH = x_PM.view(num_rows, 2, depth // 2).transpose(0, 1)
    return torch.bmm(x_2PH, weight_DM.view(-1, 2, depth // 2).permute(1, 2, 0))


def pad_mlp(width: int, device: torch.device) -> int:
    """MLP width in memory: rows of whole 256-byte lines make GEMMs on a GPU faster, and zeros change nothing."""
    padded = -(-width // 128) * 128
    return padded if device.type == "cuda" and padded * 16 <= width * 17 else width


def linear_gelu(x_PD: Tensor, weight_MD: Tensor, bias_M: Tensor) -> Tensor:
    """GELU (tanh form) of a linear layer; on a GPU inside the GEMM's epilogue (cuBLASLt)."""
    if x_PD.is_cuda:
        return torch._addmm_activation(bias_M, x_PD, weight_MD.t(), use_gelu=True)
    return F.gelu(F.linear(x_PD, weight_MD, bias_M), approximate="tanh")
