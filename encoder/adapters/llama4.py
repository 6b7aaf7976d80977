"""Llama 4: an image laid on a canvas of up to 16 tiles of 336 pixels, then the whole of it, 144 tokens a tile."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from encoder.adapters.cutting import Tile
from encoder.adapters.processors import HALF_BILINEAR, processor_of, read_pixels, read_size, text_width, vision_config
from encoder.adapters.registry import Family, Preset
from encoder.adapters.tile_kind import Size
from encoder.adapters.tiles import TileAdapter
from encoder.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from encoder.config import EncoderConfig

_DEFAULTS = {"hidden_size": 768, "image_size": 448, "patch_size": 14, "vision_output_dim": 7680}


class Llama4:
    """Implements `TileFamily`."""

    renames: tuple[tuple[str, str], ...] = ()

    def __init__(self, config: Mapping[str, Any], name: str, *, max_tiles: int | None) -> None:
        """Raises ConfigError for sizes that don't fit."""
        self.vision = vision_config(config, _DEFAULTS)
        side, patch_size = self.vision["image_size"], self.vision["patch_size"]
        self.tile_size = read_size(config, "size", side)
        if self.tile_size != (side, side) or self.vision.get("pixel_shuffle_ratio", 0.5) != 0.5:
            raise ConfigError(f"{name}: only tiles of {side} pixels, four patches a token, are supported")
        self.grid = (1, side // patch_size, side // patch_size)
        self.num_tokens = self.grid[1] * self.grid[2] // 4
        self.hidden_size = text_width(config, name)
        self.pixels = read_pixels(config, HALF_BILINEAR)
        settings = processor_of(config)
        self.most = max_tiles or settings.get("max_patches", 16)
        self.to_canvas = bool(settings.get("resize_to_max_canvas"))

    def cut(self, width: int, height: int) -> list[Tile]:
        """Tiles of the canvas row by row, black beyond the image, and the whole image where they are several."""
        side = self.tile_size[0]
        columns, rows = _canvas(width, height, side, self.most, self.to_canvas)
        most = columns * side, rows * side
        if not self.to_canvas:  # upscaled no further than a tile
            most = min(max(width, side), most[0]), min(max(height, side), most[1])
        resized = _fit(width, height, most)
        corners = [(column * side, row * side) for row in range(rows) for column in range(columns)]
        tiles = [Tile(resized=(resized,), corner=corner) for corner in corners]
        return tiles if len(tiles) == 1 else [*tiles, Tile(resized=(self.tile_size,))]

    def modules(self) -> Mapping[str, torch.nn.Module]:
        """Tower and projector."""
        from encoder.towers.stock import stock_class, stock_config

        vision = stock_config("llama4", "Llama4VisionConfig", self.vision)
        sizes = SimpleNamespace(vision_config=vision, text_config=SimpleNamespace(hidden_size=self.hidden_size))
        return {
            "vision_model.": stock_class("llama4", "Llama4VisionModel")(vision),
            "multi_modal_projector.": stock_class("llama4", "Llama4MultiModalProjector")(sizes),
        }

    def bind(self, modules: Mapping[str, Any]) -> Callable[[torch.Tensor], torch.Tensor]:
        """What the tower's adapter makes of four patches, projected."""
        tower, projector = modules["vision_model."], modules["multi_modal_projector."]
        return lambda pixels: projector(tower(pixels).last_hidden_state)


@lru_cache(maxsize=65_536)
def _canvas(width: int, height: int, side: int, most: int, to_canvas: bool) -> tuple[int, int]:
    """Columns and rows of the canvas that the image fits with the least enlargement, or else the least reduction.

    After `get_best_fit` in transformers, which computes in float32; ties go to the smaller canvas.
    """
    canvases = [(columns, count // columns) for count in range(1, most + 1) for columns in _factors(count)]
    scales = {canvas: _float32_scale(width, height, canvas, side) for canvas in canvases}
    enlarging = [scale for scale in scales.values() if scale >= 1]
    chosen = (max(enlarging) if to_canvas else min(enlarging)) if enlarging else max(scales.values())
    return min((canvas for canvas in canvases if scales[canvas] == chosen), key=lambda canvas: canvas[0] * canvas[1])


def _factors(count: int) -> list[int]:
    return [factor for factor in range(1, count + 1) if count % factor == 0]


def _float32_scale(width: int, height: int, canvas: tuple[int, int], side: int) -> float:
    import numpy as np

    scale_x, scale_y = (
        float(np.float32(count * side) / np.float32(length))
        for count, length in zip(canvas, (width, height), strict=True)
    )
    return min(scale_x, scale_y)


def _fit(width: int, height: int, most: Size) -> Size:
    """The largest size of the image's own ratio within a size; a pixel at least."""
    scale_x, scale_y = most[0] / width, most[1] / height
    if scale_x < scale_y:
        return most[0], min(max(1, math.floor(height * scale_x)), most[1])
    return min(max(1, math.floor(width * scale_y)), most[0]), most[1]


def _make(config: Mapping[str, Any], name: str, encoder: EncoderConfig) -> TileAdapter:
    return TileAdapter(Llama4(config, name, max_tiles=encoder.max_slice_nums), config, name, encoder)


def _config(vision: Mapping[str, Any], text: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["Llama4ForConditionalGeneration"],
        "model_type": "llama4",
        "text_config": {"model_type": "llama4_text", **text},
        "vision_config": {
            "model_type": "llama4_vision_model",
            "patch_size": 14,
            "rope_parameters": {"rope_theta": 10_000.0, "rope_type": "default"},
            **vision,
        },
    }


_TINY_TEXT = {
    "hidden_size": 48, "intermediate_size": 64, "intermediate_size_mlp": 64, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 24, "num_local_experts": 2, "vocab_size": 99,
}  # fmt: skip
_TINY = {
    "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 56,
    "projector_input_dim": 64, "projector_output_dim": 64, "vision_output_dim": 64,
}  # fmt: skip
_RELEASED = {
    "hidden_size": 1408, "intermediate_size": 5632, "num_hidden_layers": 34, "num_attention_heads": 16,
    "image_size": 336, "projector_input_dim": 4096, "projector_output_dim": 4096, "vision_output_dim": 4096,
}  # fmt: skip

FAMILY = Family(
    model_types=("llama4",),
    presets={
        "tiny-llama4": Preset(
            config=_config(_TINY, _TINY_TEXT),
            summary="Llama 4, 2 small layers, tiles of 56 pixels, seeded random weights",
            token_rule="4 a tile, 1 to 17 tiles",
        ),
        "random-llama4-scout": Preset(
            config=_config(_RELEASED, {"hidden_size": 5120}),
            summary="Llama 4 Scout, released size, seeded random weights",
            token_rule="144 a tile, 1 to 17 tiles",
        ),
    },
    make=_make,
    settings=("max_slice_nums",),
)
