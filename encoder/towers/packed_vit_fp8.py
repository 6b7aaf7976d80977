"""The packed transformer with its four GEMMs a layer in fp8; attention, norms and the residual stay in bfloat16.

Activations of deep layers share most of their length with each other: their mean over many images. That mean is
subtracted before a row is rounded to e4m3 and comes back, through the exact weights, in the bias:
W h + b = W (h - m) + (b + W m). It costs nothing, since the norm's own bias takes the subtraction, and what is left to
round is several times shorter.
"""

# Shapes: P rows (patches), D model width, M MLP width.

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from encoder.attention import SelfAttention
from encoder.kernels.fp8 import Linear8, add_layer_norm_8, quantise_rows
from encoder.kernels.norms import add_layer_norm, layer_norm
from encoder.towers.packed_vit import Block, Norm, linear_gelu


@dataclass(frozen=True, slots=True, kw_only=True)
class Block8:
    """One layer; the biases of `out` and `fc2` join the norm that follows them."""

    norm1: Norm  # its bias less the mean of what it gives
    qkv: Linear8
    attended_mean: Tensor
    out: Linear8
    out_bias: Tensor
    norm2: Norm
    fc1: Linear8
    hidden_mean: Tensor
    fc2: Linear8
    fc2_bias: Tensor


def quantise_blocks(x_PD: Tensor, blocks: list[Block], eps: float, attend: SelfAttention) -> list[Block8]:
    """Run sample rows through the layers in full precision and quantise each layer around the means it saw.

    Args:
        x_PD: embedded patches with their positions, of pictures like those to come.
    """
    quantised = []
    for block in blocks:
        h_PD = layer_norm(x_PD, block.norm1.weight, block.norm1.bias, eps)
        attended_PD = attend(F.linear(h_PD, block.qkv_weight, block.qkv_bias))
        x_PD = x_PD + F.linear(attended_PD, block.out_weight, block.out_bias)
        g_PD = layer_norm(x_PD, block.norm2.weight, block.norm2.bias, eps)
        hidden_PM = linear_gelu(g_PD, block.fc1_weight, block.fc1_bias)
        x_PD = x_PD + F.linear(hidden_PM, block.fc2_weight, block.fc2_bias)
        norm1, h_mean = _centred(block.norm1, _mean(h_PD))
        norm2, g_mean = _centred(block.norm2, _mean(g_PD))
        attended_mean, hidden_mean = _mean(attended_PD), _mean(hidden_PM)
        quantised.append(
            Block8(
                norm1=norm1,
                qkv=Linear8.of(block.qkv_weight, _plus(block.qkv_bias, block.qkv_weight, h_mean)),
                attended_mean=attended_mean,
                out=Linear8.of(block.out_weight),
                out_bias=_plus(block.out_bias, block.out_weight, attended_mean),
                norm2=norm2,
                fc1=Linear8.of(block.fc1_weight, _plus(block.fc1_bias, block.fc1_weight, g_mean)),
                hidden_mean=hidden_mean,
                fc2=Linear8.of(block.fc2_weight),
                fc2_bias=_plus(block.fc2_bias, block.fc2_weight, hidden_mean),
            )
        )
    return quantised


def _mean(rows_PD: Tensor) -> Tensor:
    """In the rows' own dtype: what is subtracted is then exactly what the bias gives back."""
    return rows_PD.float().mean(0).to(rows_PD.dtype)


def _centred(norm: Norm, mean_D: Tensor) -> tuple[Norm, Tensor]:
    """A norm whose bias gives rows less their mean, and the mean as the rounded bias has it (float32)."""
    bias = norm.bias - mean_D
    return Norm(weight=norm.weight, bias=bias), norm.bias.float() - bias.float()


def _plus(bias: Tensor, weight: Tensor, mean: Tensor) -> Tensor:
    return (bias.float() + weight.float() @ mean.float()).to(bias.dtype)


def run_blocks_8(
    x_PD: Tensor,
    positions_RD: Tensor,
    ids_P: Tensor,
    blocks: list[Block8],
    post_norm: Norm,
    eps: float,
    attend: SelfAttention,
) -> Tensor:
    """Embedded patches to normed features `[P, D]`; see `packed_vit.run_blocks`."""
    first = blocks[0].norm1
    x_PD, h_PD = add_layer_norm(x_PD, positions_RD, first.weight, first.bias, eps, rows_P=ids_P)
    h8 = quantise_rows(h_PD)
    for index, block in enumerate(blocks):
        delta_PD = block.out(quantise_rows(attend(block.qkv(h8)), mean_D=block.attended_mean))
        norm = block.norm2
        x_PD, h8 = add_layer_norm_8(x_PD, delta_PD, norm.weight, norm.bias, eps, block.out_bias)
        delta_PD = block.fc2(quantise_rows(block.fc1(h8), gelu=True, mean_D=block.hidden_mean))
        if index + 1 < len(blocks):
            norm = blocks[index + 1].norm1
            x_PD, h8 = add_layer_norm_8(x_PD, delta_PD, norm.weight, norm.bias, eps, block.fc2_bias)
    _, features_PD = add_layer_norm(
        x_PD, delta_PD, post_norm.weight, post_norm.bias, eps, delta_bias_D=blocks[-1].fc2_bias
    )
    return features_PD
