"""LFM2-VL: an image of up to 256 tokens in one piece; a larger one in tiles of 512 pixels and a thumbnail."""

# Shapes: P patches, T tokens.

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from encoder.adapters.cutting import Tile, arrangement, grid_of_tiles
from encoder.adapters.grids import GridAdapter
from encoder.adapters.processors import HALF_BILINEAR, processor_of, read_pixels, text_width, vision_config
from encoder.adapters.registry import Family, Preset
from encoder.adapters.siglip2 import DEFAULTS, bind_tower, position_rows, position_tables
from encoder.adapters.stock_families import Rows
from encoder.adapters.tile_kind import Size
from encoder.types import Grid

if TYPE_CHECKING:
    import torch

    from encoder.config import EncoderConfig


class Lfm2VL:
    """Implements `GridFamily`."""

    renames: tuple[tuple[str, str], ...] = ()
    inner_order = ()
    pooled_patches = 0

    def __init__(self, config: Mapping[str, Any], name: str, *, max_tiles: int | None) -> None:
        self.vision = {**vision_config(config, DEFAULTS), "vision_use_head": False}
        self.config, settings = config, processor_of(config)
        self.merge = config.get("downsample_factor", 2)
        self.patch_size = settings.get("encoder_patch_size", self.vision["patch_size"])
        self.hidden_size = text_width(config, name)
        self.pixels = read_pixels(config, HALF_BILINEAR)
        self.tables = position_tables(self.vision)
        self.least_tokens = settings.get("min_image_tokens", 64)
        self.most_tokens = settings.get("max_image_tokens", 256)
        self.tile_side = settings.get("tile_size", 512)
        self.tolerance = settings.get("max_pixels_tolerance", 2.0)
        self.thumbnail = settings.get("use_thumbnail", True)
        splits = settings.get("do_image_splitting", True)
        most = max_tiles or settings.get("max_tiles", 10)
        self.tiles = (min(settings.get("min_tiles", 2), most), most) if splits else (1, 1)

    @property
    def side(self) -> int:
        """Pixels of a token's side."""
        return int(self.patch_size * self.merge)

    def cut(self, width: int, height: int) -> list[Tile]:
        """The whole image, or where it is large tiles of it, row by row, and then the whole image."""
        whole = Tile(resized=(self._size(width, height),))
        least, most = self.tiles
        if most == 1 or not self._is_large(width, height):
            return [whole]
        side = self.tile_side
        columns, rows = arrangement(width, height, (side, side), least, most)
        tiles = grid_of_tiles(((columns * side, rows * side),), (side, side))
        return [*tiles, whole] if self.thumbnail and len(tiles) > 1 else tiles

    def _is_large(self, width: int, height: int) -> bool:
        rounded = (max(self.patch_size, round(length / self.side) * self.side) for length in (width, height))
        return bool(math.prod(rounded) > self.most_tokens * self.side**2 * self.tolerance)

    def _size(self, width: int, height: int) -> Size:
        """Whole tokens, of nearly the image's ratio, as many as allowed."""
        side = self.side
        sizes = [max(side, round(length / side) * side) for length in (width, height)]
        least, most = (tokens * side**2 for tokens in (self.least_tokens, self.most_tokens))
        if math.prod(sizes) > most:
            beta = math.sqrt(height * width / most)
            sizes = [max(side, math.floor(length / beta / side) * side) for length in (width, height)]
        elif math.prod(sizes) < least:
            beta = math.sqrt(least / (height * width))
            sizes = [math.ceil(length * beta / side) * side for length in (width, height)]
        return sizes[0], sizes[1]

    def rows(self, grid: Grid) -> Mapping[str, np.ndarray]:
        """Weights of each patch's row and column over the table's."""
        return position_rows(grid, self.merge, self.vision)

    def modules(self) -> Mapping[str, torch.nn.Module]:
        """Tower and projector."""
        from encoder.towers.stock import stock_class, stock_config

        vision = stock_config("siglip2", "Siglip2VisionConfig", self.vision)
        sizes = SimpleNamespace(
            vision_config=vision,
            text_config=SimpleNamespace(hidden_size=self.hidden_size),
            downsample_factor=self.merge,
            projector_use_layernorm=self.config.get("projector_use_layernorm", True),
            projector_hidden_size=self.config.get("projector_hidden_size", 2560),
            projector_bias=self.config.get("projector_bias", True),
            projector_hidden_act=self.config.get("projector_hidden_act", "gelu"),
        )
        return {
            "model.vision_tower.vision_model.": stock_class("siglip2", "Siglip2VisionModel")(vision),
            "model.multi_modal_projector.": stock_class("lfm2_vl", "Lfm2VlMultiModalProjector")(sizes),
        }

    def bind(self, modules: Mapping[str, Any]) -> Callable[[Rows], torch.Tensor]:
        """Features of a token's patches side by side, projected."""
        features = bind_tower(modules["model.vision_tower.vision_model."], self)
        projector = modules["model.multi_modal_projector."]

        def forward(rows: Rows) -> torch.Tensor:
            squares = features(rows).unflatten(0, (-1, self.merge**2)).flatten(1)
            if projector.layer_norm is not None:
                squares = projector.layer_norm(squares)
            tokens: torch.Tensor = projector.linear_2(projector.act(projector.linear_1(squares)))
            return tokens

        return forward


def _make(config: Mapping[str, Any], name: str, encoder: EncoderConfig) -> GridAdapter:
    return GridAdapter(Lfm2VL(config, name, max_tiles=encoder.max_slice_nums), config, name, encoder)


def _config(vision: Mapping[str, Any], text: Mapping[str, Any], projector: int) -> dict[str, Any]:
    return {
        "architectures": ["Lfm2VlForConditionalGeneration"],
        "model_type": "lfm2_vl",
        "projector_hidden_size": projector,
        "text_config": {"model_type": "lfm2", **text},
        "vision_config": {"model_type": "siglip2_vision_model", "vision_use_head": False, **vision},
    }


_TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
_SO400M = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}

FAMILY = Family(
    model_types=("lfm2_vl",),
    presets={
        "tiny-lfm2-vl": Preset(
            config=_config(
                {**_TINY, "num_patches": 16},
                {**_TINY, "num_key_value_heads": 2, "vocab_size": 99, "layer_types": ["conv", "full_attention"]},
                96,
            )
            | {
                "preprocessor_config": {
                    "tile_size": 64,
                    "min_image_tokens": 2,
                    "max_image_tokens": 6,
                    "max_tiles": 6,
                    "image_mean": None,
                }
            },
            summary="LFM2-VL, 2 small layers, tiles of 64 pixels, seeded random weights",
            token_rule="2 to 6, or 4 for each of up to 6 tiles and a thumbnail",
        ),
        "random-lfm2-vl-1.6b": Preset(
            config=_config({**_SO400M, "num_patches": 256}, {"hidden_size": 2048}, 2560),
            summary="LFM2-VL 1.6B, released size, seeded random weights",
            token_rule="64 to 256, or 256 for each of up to 10 tiles and a thumbnail",
        ),
    },
    make=_make,
    settings=("max_slice_nums",),
)
