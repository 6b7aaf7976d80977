"""The packed transformer with its four GEMMs a layer in fp8; attention, norms and the residual stay in bfloat16."""

# Shapes: P rows (patches), D model width.

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from encoder.attention import SelfAttention
from encoder.kernels.fp8 import Linear8, add_layer_norm_8, quantise_rows
from encoder.kernels.norms import add_layer_norm
from encoder.towers.packed_vit import Block, Norm


@dataclass(frozen=True, slots=True, kw_only=True)
class Block8:
    """One layer; the biases of `out` and `fc2` join the norm that follows them."""

    norm1: Norm
    qkv: Linear8
    out: Linear8
    out_bias: Tensor
    norm2: Norm
    fc1: Linear8
    fc2: Linear8
    fc2_bias: Tensor

    @classmethod
    def of(cls, block: Block) -> Block8:
        """Quantise the weights of a block."""
        return cls(
            norm1=block.norm1,
            qkv=Linear8.of(block.qkv_weight, block.qkv_bias),
            out=Linear8.of(block.out_weight),
            out_bias=block.out_bias,
            norm2=block.norm2,
            fc1=Linear8.of(block.fc1_weight, block.fc1_bias),
            fc2=Linear8.of(block.fc2_weight),
            fc2_bias=block.fc2_bias,
        )


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
        delta_PD = block.out(quantise_rows(attend(block.qkv(h8))))
        norm = block.norm2
        x_PD, h8 = add_layer_norm_8(x_PD, delta_PD, norm.weight, norm.bias, eps, block.out_bias)
        delta_PD = block.fc2(quantise_rows(block.fc1(h8), gelu=True))
        if index + 1 < len(blocks):
            norm = blocks[index + 1].norm1
            x_PD, h8 = add_layer_norm_8(x_PD, delta_PD, norm.weight, norm.bias, eps, block.fc2_bias)
    last = blocks[-1]
    _, features_PD = add_layer_norm(x_PD, delta_PD, post_norm.weight, post_norm.bias, eps, delta_bias_D=last.fc2_bias)
    return features_PD
