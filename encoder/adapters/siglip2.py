"""SigLIP 2 of native ratio (NaFlex) as a plain image encoder: an image in at most 256 patches of its own ratio.

Its releases of one fixed size are SigLIP's architecture, and read as such.
"""

# Shapes: P patches, D model width, G rows (and columns) of the table of positions, S segments.

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from encoder.adapters.cutting import Tile
from encoder.adapters.frame_indices import frame_indices
from encoder.adapters.grids import GridAdapter
from encoder.adapters.processors import HALF_BILINEAR, processor_of, read_pixels, vision_config
from encoder.adapters.registry import Family, Preset
from encoder.adapters.stock_families import Rows, Table
from encoder.adapters.tile_kind import Size
from encoder.errors import ConfigError
from encoder.types import Grid

if TYPE_CHECKING:
    import torch

    from encoder.config import EncoderConfig

DEFAULTS = {"hidden_size": 768, "num_attention_heads": 12, "num_patches": 256, "patch_size": 16}


class Siglip2:
    """Implements `GridFamily`."""

    renames: tuple[tuple[str, str], ...] = ()
    inner_order = ()
    merge = 1

    def __init__(self, config: Mapping[str, Any], name: str, *, pooled: bool) -> None:
        """Raises ConfigError where pooling is asked of a tower without a head."""
        self.vision = vision_config(config, {**DEFAULTS, "vision_use_head": True})
        if pooled and not self.vision["vision_use_head"]:
            raise ConfigError(f"{name}: its tower has no pooling head; use output 'patches'")
        settings = processor_of(config)
        self.patch_size = settings.get("patch_size", self.vision["patch_size"])
        self.most = settings.get("max_num_patches", 256)
        self.pooled_patches = self.most if pooled else 0
        self.hidden_size = self.vision["hidden_size"]
        self.pixels = read_pixels(config, HALF_BILINEAR)
        self.tables = position_tables(self.vision)

    def cut(self, width: int, height: int) -> list[Tile]:
        """The whole image, as large as the patches allow."""
        return [Tile(resized=(largest_size(width, height, self.patch_size, self.most),))]

    def rows(self, grid: Grid) -> Mapping[str, np.ndarray]:
        """Weights of each patch's row and column over the table's."""
        return position_rows(grid, self.merge, self.vision)

    def modules(self) -> Mapping[str, torch.nn.Module]:
        """The tower with its pooling head."""
        from encoder.towers.stock import stock_class, stock_config

        config = stock_config("siglip2", "Siglip2VisionConfig", self.vision)
        return {"vision_model.": stock_class("siglip2", "Siglip2VisionModel")(config)}

    def bind(self, modules: Mapping[str, Any]) -> Callable[[Rows], torch.Tensor]:
        """Normed features, or what the head makes of them."""
        tower = modules["vision_model."]
        features = bind_tower(tower, self)
        return bind_head(tower.head, features) if self.pooled_patches else features


def position_tables(vision: Mapping[str, Any]) -> dict[str, Table]:
    """Weights over the rows and columns of the table of positions."""
    side = math.isqrt(vision["num_patches"])
    return {"row_weights": ((side,), "float32"), "column_weights": ((side,), "float32")}


def position_rows(grid: Grid, merge: int, vision: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """How the table of positions is resized to a grid, for each patch."""
    side = math.isqrt(vision["num_patches"])
    places = frame_indices(grid[1], grid[2], merge, 0)
    return {
        "row_weights": _axis_weights(grid[1], side)[places.rows_P],
        "column_weights": _axis_weights(grid[2], side)[places.columns_P],
    }


@lru_cache(maxsize=1024)
def _axis_weights(size: int, side: int) -> np.ndarray:
    """`[size, side]` float32: bilinear with antialiasing, corners not aligned, as transformers 5.24 computes it.

    5.17 has `F.interpolate` do it, which on a CPU repeats the first row where a grid has one column (torch 2.13).
    """
    scale = np.float32(side / size)
    centres = (np.arange(size, dtype=np.float32) + np.float32(0.5)) * scale - np.float32(0.5)
    distances = np.abs(np.arange(side, dtype=np.float32) - centres[:, None]) / max(scale, np.float32(1))
    weights = (1 - distances).clip(min=0)
    return np.asarray(weights / weights.sum(1, keepdims=True), dtype=np.float32)


@lru_cache(maxsize=65_536)
def largest_size(width: int, height: int, patch_size: int, most: int) -> Size:
    """Whole patches of nearly the image's ratio, as many as are allowed, by the processor's own search for a scale."""

    def side(length: int, scale: float) -> int:
        return max(patch_size, math.ceil(length * scale / patch_size) * patch_size)

    low, high = 1e-6, 100.0
    while high - low >= 1e-5:
        scale = (low + high) / 2
        fits = (side(height, scale) / patch_size) * (side(width, scale) / patch_size) <= most
        low, high = (scale, high) if fits else (low, scale)
    return side(width, low), side(height, low)


def bind_tower(tower: Any, family: Any) -> Callable[[Rows], torch.Tensor]:
    """Patches to normed features `[P, D]`. The tower as a whole pads images to one length and masks the padding."""
    from encoder.towers.stock import PatchEmbedding

    embed = PatchEmbedding(tower.embeddings.patch_embedding, family.pixels, channels_last=True)
    table_GD = tower.embeddings.position_embedding.weight.float()

    def forward(rows: Rows) -> torch.Tensor:
        weights = rows.tables["row_weights"][:, :, None] * rows.tables["column_weights"][:, None, :]
        x_PD = embed(rows.pixels_PC)
        x_PD = x_PD + (weights.flatten(1) @ table_GD).to(x_PD.dtype)
        encoded = tower.encoder(inputs_embeds=x_PD[None], attention_mask=None).last_hidden_state
        features_PD: torch.Tensor = tower.post_layernorm(encoded)[0]
        return features_PD

    return forward


def bind_head(head: Any, features: Callable[[Rows], torch.Tensor]) -> Callable[[Rows], torch.Tensor]:
    """One token a segment: the head's probe attends to the segment's patches."""
    from torch.nn.functional import linear

    from encoder.towers.stock_attention import pool

    attention = head.attention
    (weight_q, *weights_kv), (bias_q, *biases_kv) = attention.in_proj_weight.chunk(3), attention.in_proj_bias.chunk(3)
    query_1D = linear(head.probe[0], weight_q, bias_q).contiguous()

    def forward(rows: Rows) -> torch.Tensor:
        features_PD = features(rows)
        key_PD, value_PD = (linear(features_PD, *pair) for pair in zip(weights_kv, biases_kv, strict=True))
        pooled_SD = attention.out_proj(pool(query_1D, key_PD, value_PD, attention.num_heads))
        tokens: torch.Tensor = pooled_SD + head.mlp(head.layernorm(pooled_SD))
        return tokens

    return forward


def _make(config: Mapping[str, Any], name: str, encoder: EncoderConfig) -> GridAdapter:
    return GridAdapter(Siglip2(config, name, pooled=encoder.output == "pooled"), config, name, encoder)


def _config(vision: Mapping[str, Any], text: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["Siglip2Model"],
        "model_type": "siglip2",
        "text_config": {"model_type": "siglip2_text_model", **text},
        "vision_config": {"model_type": "siglip2_vision_model", **vision},
    }


_TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
_SO400M = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}

FAMILY = Family(
    model_types=("siglip2", "siglip2_vision_model"),
    outputs=("patches", "pooled"),
    presets={
        "tiny-siglip2": Preset(
            config=_config({**_TINY, "num_patches": 16}, {**_TINY, "vocab_size": 99})
            | {"preprocessor_config": {"max_num_patches": 36}},
            summary="SigLIP 2 NaFlex, 2 small layers, 36 patches, seeded random weights",
            token_rule="1 a patch, up to 36; 1 pooled",
        ),
        "random-siglip2-so400m-patch16-naflex": Preset(
            config=_config({**_SO400M, "num_patches": 256}, {**_SO400M, "vocab_size": 256_000}),
            summary="SigLIP 2 SO400M NaFlex, released size, seeded random weights",
            token_rule="1 a patch, up to 256; 1 pooled",
        ),
    },
    make=_make,
)
