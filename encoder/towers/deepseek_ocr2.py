"""DeepSeek-OCR 2's towers for one view: whatever its size determines is made once, so that a forward reads no value."""

# Shapes: N tiles, P patches of one after the first tower, Q queries, L both together, D width of the second tower, R
# distances between patches, C channels of an attention head.

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate


def bind_view(
    tower: Any, projector: Any, side: int, pixels: int, shrink: int, separator: Tensor | None
) -> Callable[[Tensor], Tensor]:
    """The forward of tiles of `pixels` pixels and `side` patches a side, from `[N, 3, H, W]` to `[N, T, E]`."""
    sam, encoder = tower.sam_encoder, tower.vision_encoder
    queries_QD = getattr(tower, f"query_{pixels}_resolution").weight
    num_patches = (side // shrink) ** 2
    length = num_patches + len(queries_QD)
    device = queries_QD.device
    # Patches attend to each other, a query to them and to the queries before it and itself.
    mask = torch.ones(length, length, dtype=torch.bool, device=device).tril_()
    mask[:num_patches, :num_patches] = True
    rotary = encoder.rotary_emb(queries_QD, torch.arange(length, device=device)[None])
    places = sam.interpolate_pos_encoding(side, side)
    relative = [_relative(layer.attn, layer.window_size or side) for layer in sam.layers]

    def forward(pixels_NCHW: Tensor) -> Tensor:
        x = sam.patch_embed(pixels_NCHW) + places
        for layer, pair in zip(sam.layers, relative, strict=True):
            layer.attn.get_rel_pos = partial(_known, layer.attn, pair)
            x = layer(x)
        x_NPD = sam.proj(sam.neck(x)).flatten(2).transpose(1, 2)
        x_NLD = torch.cat([x_NPD, queries_QD.expand(len(x_NPD), -1, -1)], dim=1)
        for layer in encoder.layers:
            x_NLD = layer(x_NLD, attention_mask=mask[None, None], position_embeddings=rotary)
        tokens: Tensor = projector(encoder.norm(x_NLD)[:, num_patches:])
        if separator is not None:
            tokens = torch.cat([tokens, separator.expand(len(tokens), 1, -1)], dim=1)
        return tokens

    return forward


def _relative(attention: Any, side: int) -> tuple[Tensor, Tensor]:
    """What the attention adds for the distance of rows and of columns: `[side, side, C]` each."""
    places = torch.arange(side, device=attention.rel_pos_h.device)
    distances = places[:, None] - places + side - 1
    rows, columns = (
        interpolate(table_RC.float().T[None], size=2 * side - 1, mode="linear")[0].T[distances].to(table_RC.dtype)
        for table_RC in (attention.rel_pos_h, attention.rel_pos_w)
    )
    return rows, columns


def _known(attention: Any, pair: tuple[Tensor, Tensor], query_side: int, key_side: int, table: Tensor) -> Tensor:
    """In place of the module's own, which indexes with numbers of the host."""
    return pair[0] if table is attention.rel_pos_h else pair[1]
