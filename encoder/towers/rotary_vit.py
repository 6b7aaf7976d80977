"""Pre-norm transformer blocks over packed rows, as the Qwen-VL line has them: LayerNorm or RMSNorm, GELU or SwiGLU.

Positions, rotary ones and windows belong to the attention, which is passed in for each layer. Pad rows may hold
anything: nothing here mixes rows. `packed_vit.py` is the same for SigLIP's blocks.
"""

# Shapes: P rows (patches), D model width, M MLP width.

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from encoder.attention import SelfAttention
from encoder.kernels.activations import gelu_, swiglu
from encoder.kernels.norms import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from encoder.towers.packed_vit import linear_gelu

Activation = Literal["tanh", "exact", "quick", "swiglu"]
"""GELU in three forms, or SwiGLU, whose first projection gives the gate and then what it gates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """Scale and shift `[D]`; without a shift it is an RMSNorm."""

    weight: Tensor
    bias: Tensor | None
    eps: float = 1e-6

    def of(self, x_PD: Tensor) -> Tensor:
        """Normed rows."""
        if self.bias is None:
            return rms_norm(x_PD, self.weight, self.eps)
        return layer_norm(x_PD, self.weight, self.bias, self.eps)

    def of_sum(self, x_PD: Tensor, delta_PD: Tensor, delta_bias_D: Tensor) -> tuple[Tensor, Tensor]:
        """The sum of all three and its normed rows, in one pass."""
        if self.bias is None:
            return add_rms_norm(x_PD, delta_PD, self.weight, self.eps, delta_bias_D=delta_bias_D)
        return add_layer_norm(x_PD, delta_PD, self.weight, self.bias, self.eps, delta_bias_D=delta_bias_D)


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """A projection, `[out, in]` and `[out]`."""

    weight: Tensor
    bias: Tensor

    def of(self, x_PD: Tensor) -> Tensor:
        """Projected rows."""
        return F.linear(x_PD, self.weight, self.bias)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One layer; query, key and value projections are fused: `[3D, D]`."""

    norm1: Norm
    qkv: Linear
    out: Linear
    norm2: Norm
    fc1: Linear
    fc2: Linear


def run_blocks(
    x_PD: Tensor,
    blocks: Sequence[Block],
    final_norm: Norm,
    activation: Activation,
    attends: Sequence[SelfAttention],
    keep: Collection[int] = (),
) -> tuple[Tensor, dict[int, Tensor]]:
    """Embedded patches to normed features `[P, D]`, and the residual stream behind the layers in `keep`.

    Each residual add is fused with the norm that follows it, and takes the bias of the projection before it along.
    """
    kept: dict[int, Tensor] = {}
    h_PD = blocks[0].norm1.of(x_PD)
    for index, (block, attend) in enumerate(zip(blocks, attends, strict=True)):
        delta_PD = F.linear(attend(block.qkv.of(h_PD)), block.out.weight)
        x_PD, h_PD = block.norm2.of_sum(x_PD, delta_PD, block.out.bias)
        delta_PD = F.linear(activated(block.fc1, h_PD, activation), block.fc2.weight)
        norm = blocks[index + 1].norm1 if index + 1 < len(blocks) else final_norm
        x_PD, h_PD = norm.of_sum(x_PD, delta_PD, block.fc2.bias)
        if index in keep:
            kept[index] = x_PD
    return h_PD, kept


def activated(linear: Linear, x_PD: Tensor, activation: Activation) -> Tensor:
    """The activation of a projection, `[P, M]`."""
    if activation == "tanh":
        return linear_gelu(x_PD, linear.weight, linear.bias)
    if activation == "swiglu":
        return swiglu(linear.of(x_PD))
    return gelu_(linear.of(x_PD), activation)
