"""What transformers' modules of Kimi-K2.5 lack: fused weights as they are released, and averages without host syncs."""

# Shapes: P patches of a run, J of them after averaging, K frames that go together, D tower width.

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def unfuse(attention: Any) -> None:
    """Queries, keys and values apart; released ones rotate neighbouring numbers, transformers' halves of a head."""
    weight, bias = attention.wqkv.weight, attention.wqkv.bias
    for name, part_weight, part_bias in zip("qkv", weight.chunk(3), bias.chunk(3), strict=True):
        if name != "v":
            heads = (attention.num_heads, -1, 2)
            part_weight = part_weight.unflatten(0, heads).transpose(1, 2).flatten(0, 2)
            part_bias = part_bias.unflatten(0, heads).transpose(1, 2).flatten()
        linear = torch.nn.Linear(1, 1, device="meta")
        linear.weight = torch.nn.Parameter(part_weight.contiguous(), requires_grad=False)
        linear.bias = torch.nn.Parameter(part_bias.contiguous(), requires_grad=False)
        setattr(attention, f"{name}_proj", linear)
    del attention.wqkv


def pool_frames(x_PD: torch.Tensor, tables: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The average of the frames at each place `[J, D]`; in a run of images, what came."""
    if "pooled" not in tables:
        return x_PD
    pooled_JK, weights_JK = tables["pooled"], tables["pooled_weights"]
    parts = [
        x_PD.index_select(0, places_J).float() * weights_J[:, None]
        for places_J, weights_J in zip(pooled_JK.unbind(1), weights_JK.unbind(1), strict=True)
    ]
    return sum(parts[1:], start=parts[0]).to(x_PD.dtype)
