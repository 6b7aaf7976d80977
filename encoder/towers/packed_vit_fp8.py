"""The packed transformer with its four GEMMs a layer in fp8; attention, norms and the residual stay in bfloat16.

Nearly all of the error is that of the rounded weights, since activations share much of their length: their mean over
many images, and a few directions beside it. The mean is subtracted before a row is rounded and comes back, through the
exact weights, in the bias: W h + b = W (h - m) + (b + W m). It costs nothing, since the norm's own bias takes the
subtraction. The directions are what `rounding.py` rounds the weights for.
"""

# Shapes: P rows (patches), D model width, M MLP width, K width of some rows.

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from encoder.attention import RaggedAttention, SelfAttention
from encoder.kernels.fp8 import Linear8, add_layer_norm_8, factor_for, quantise_rows, round_8
from encoder.kernels.norms import add_layer_norm, layer_norm
from encoder.towers.packed_vit import Block, Norm, linear_gelu
from encoder.towers.rounding import round_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What the inputs of a linear layer looked like, float32."""

    mean_K: Tensor
    factor: float  # for rows less the mean
    covariance_KK: Tensor | None

    @classmethod
    def of(cls, rows_PK: Tensor, *, covariance: bool = True) -> Seen:
        """Of sample rows; `covariance` for weights that are worth their rounding."""
        mean_K = rows_PK.float().mean(0)
        centred_PK = rows_PK.float() - mean_K
        return cls(
            mean_K=mean_K,
            factor=factor_for(float(centred_PK.abs().max())),
            covariance_KK=centred_PK.t() @ centred_PK / len(centred_PK) if covariance else None,
        )

    def centred(self, norm: Norm) -> tuple[Norm, Seen]:
        """A norm that gives such rows less their mean, times the factor; and the mean as its rounded bias has it."""
        # In the norm's own dtype: the kernels read weight and bias once a row, which shows where they are float32.
        bias = norm.bias - self.mean_K.to(norm.bias.dtype)
        mean_K = norm.bias.float() - bias.float()
        return Norm(weight=norm.weight * self.factor, bias=bias * self.factor), replace(self, mean_K=mean_K)

    def bias(self, bias: Tensor, weight: Tensor) -> Tensor:
        """A bias that gives back what the mean would have added."""
        return (bias.float() + weight.float() @ self.mean_K).to(bias.dtype)

    def round(self, rows_PK: Tensor, *, gelu: bool = False) -> Tensor:
        """Such rows as the linear layer takes them, after GELU if asked for."""
        return quantise_rows(rows_PK, self.factor, gelu=gelu, mean_D=self.mean_K)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block8:
    """One layer; the biases of `out` and `fc2` join the norm that follows them. Norms give centred, scaled rows."""

    norm1: Norm
    qkv: Linear8
    attended: Seen
    out: Linear8
    out_bias: Tensor
    norm2: Norm
    fc1: Linear8
    hidden: Seen
    fc2: Linear8
    fc2_bias: Tensor


def quantise_blocks(
    x_PD: Tensor, blocks: list[Block], eps: float, attend: SelfAttention
) -> tuple[list[Block8], Tensor]:
    """Layers quantised for what they see of sample rows in full precision, and those rows behind the last one.

    Args:
        x_PD: embedded patches with their positions, of pictures like those to come.
    """
    seen: list[tuple[Seen, Seen, Seen, Seen]] = []
    for block in blocks:
        h_PD = layer_norm(x_PD, block.norm1.weight, block.norm1.bias, eps)
        attended_PD = attend(F.linear(h_PD, block.qkv_weight, block.qkv_bias))
        x_PD = x_PD + F.linear(attended_PD, block.out_weight, block.out_bias)
        g_PD = layer_norm(x_PD, block.norm2.weight, block.norm2.bias, eps)
        hidden_PM = linear_gelu(g_PD, block.fc1_weight, block.fc1_bias)
        x_PD = x_PD + F.linear(hidden_PM, block.fc2_weight, block.fc2_bias)
        # fc2 has the widest rows and the least part in the error: its weights go to their nearest numbers.
        seen.append((Seen.of(h_PD), Seen.of(attended_PD), Seen.of(g_PD), Seen.of(hidden_PM, covariance=False)))
    inputs_qkv, inputs_out, inputs_fc1, inputs_fc2 = (list(column) for column in zip(*seen, strict=True))
    qkv = quantise_linears([block.qkv_weight for block in blocks], inputs_qkv)
    out = quantise_linears([block.out_weight for block in blocks], inputs_out)
    fc1 = quantise_linears([block.fc1_weight for block in blocks], inputs_fc1)
    fc2 = quantise_linears([block.fc2_weight for block in blocks], inputs_fc2)
    quantised = []
    for index, (block, (h, attended, g, hidden)) in enumerate(zip(blocks, seen, strict=True)):
        (norm1, h), (norm2, g) = h.centred(block.norm1), g.centred(block.norm2)
        quantised.append(
            Block8(
                norm1=norm1,
                qkv=replace(qkv[index], bias_N=h.bias(block.qkv_bias, block.qkv_weight)),
                attended=replace(attended, covariance_KK=None),
                out=out[index],
                out_bias=attended.bias(block.out_bias, block.out_weight),
                norm2=norm2,
                fc1=replace(fc1[index], bias_N=g.bias(block.fc1_bias, block.fc1_weight)),
                hidden=hidden,
                fc2=fc2[index],
                fc2_bias=hidden.bias(block.fc2_bias, block.fc2_weight),
            )
        )
    return quantised, x_PD


def quantise_linears(weights: list[Tensor], inputs: list[Seen]) -> list[Linear8]:
    """Linear layers of one shape, without bias, each for its own inputs."""
    factors = [factor_for(float(weight.abs().max())) for weight in weights]
    scaled_LNK = torch.stack([weight.float() * factor for weight, factor in zip(weights, factors, strict=True)])
    covariances = [rows.covariance_KK for rows in inputs if rows.covariance_KK is not None]
    rounded_LNK = round_weights(scaled_LNK, torch.stack(covariances)) if covariances else round_8(scaled_LNK)
    return [
        # A copy of its own: one layer's weights don't hold on to all others'.
        Linear8.of(rounded_NK.clone(), factor, rows.factor)
        for rounded_NK, factor, rows in zip(rounded_LNK, factors, inputs, strict=True)
    ]


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
    ones_P1 = torch.ones(len(x_PD), 1, device=x_PD.device)
    first = blocks[0].norm1
    x_PD, h_PD = add_layer_norm(x_PD, positions_RD, first.weight, first.bias, eps, rows_P=ids_P)
    h8_PD = quantise_rows(h_PD, 1.0)
    for index, block in enumerate(blocks):
        delta_PD = block.out(_attend_8(attend, block.qkv(h8_PD, ones_P1), block.attended), ones_P1)
        norm = block.norm2
        x_PD, h8_PD = add_layer_norm_8(x_PD, delta_PD, norm.weight, norm.bias, eps, block.out_bias)
        delta_PD = block.fc2(block.hidden.round(block.fc1(h8_PD, ones_P1), gelu=True), ones_P1)
        if index + 1 < len(blocks):
            norm = blocks[index + 1].norm1
            x_PD, h8_PD = add_layer_norm_8(x_PD, delta_PD, norm.weight, norm.bias, eps, block.fc2_bias)
    _, features_PD = add_layer_norm(
        x_PD, delta_PD, post_norm.weight, post_norm.bias, eps, delta_bias_D=blocks[-1].fc2_bias
    )
    return features_PD


def _attend_8(attend: SelfAttention, qkv: Tensor, seen: Seen) -> Tensor:
    if isinstance(attend, RaggedAttention):
        return attend.rounded(qkv, seen.mean_K, seen.factor)
    return seen.round(attend(qkv))
