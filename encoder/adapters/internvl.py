"""InternVL (2.5, 3 and 3.5 as transformers has them): up to 12 tiles of 448 pixels and a thumbnail, 256 tokens each.

A frame of a video is one tile.
"""

# Shapes: N tiles, R rows and columns of patches, D tower width.

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from encoder.adapters.clips import ClipTileAdapter
from encoder.adapters.cutting import Tile, arrangement, grid_of_tiles
from encoder.adapters.processors import (
    CLIP,
    as_pair,
    clip_processor_of,
    processor_of,
    read_pixels,
    read_size,
    text_width,
    vision_config,
)
from encoder.adapters.registry import Family, Preset
from encoder.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from encoder.config import EncoderConfig, VideoConfig
    from encoder.media import MediaHeader

NUM_FRAMES = 8  # of a clip; its processor leaves it to the caller
_DEFAULTS = {"hidden_size": 1024, "image_size": 448, "patch_size": 14}


class InternVL:
    """Implements `ClipTileFamily`."""

    renames: tuple[tuple[str, str], ...] = ()

    def __init__(self, config: Mapping[str, Any], name: str, *, max_tiles: int | None) -> None:
        """Raises ConfigError for features of another layer than the last, and for sizes that don't fit."""
        self.vision, self.config = vision_config(config, _DEFAULTS), config
        if config.get("vision_feature_layer", -1) != -1 or config.get("downsample_ratio", 0.5) != 0.5:
            raise ConfigError(f"{name}: only features of the last layer, four patches a token, are supported")
        self.tile_size = as_pair(self.vision["image_size"])
        rows, columns = (
            side // patch for side, patch in zip(self.tile_size, as_pair(self.vision["patch_size"]), strict=True)
        )
        if read_size(config, "size", self.tile_size[0]) != self.tile_size or rows != columns or rows % 2:
            raise ConfigError(f"{name}: its tiles of {self.tile_size} pixels are not what processor and tower agree on")
        self.grid = (1, rows, columns)
        self.num_tokens = rows * columns // 4
        self.hidden_size = text_width(config, name)
        self.pixels = read_pixels(config, CLIP)
        settings = processor_of(config)
        self.least = settings.get("min_patches", 1)
        self.most = max_tiles or settings.get("max_patches", 12)
        self.num_frames = clip_processor_of(config).get("num_frames") or NUM_FRAMES

    def cut(self, width: int, height: int) -> list[Tile]:
        """The arrangement of tiles nearest in ratio of sides, and the whole image where they are more than one."""
        side_x, side_y = self.tile_size
        columns, rows = arrangement(width, height, self.tile_size, self.least, self.most)
        tiles = grid_of_tiles(((columns * side_x, rows * side_y),), self.tile_size)
        return tiles if len(tiles) == 1 else [*tiles, Tile(resized=(self.tile_size,))]

    def frame_numbers(self, header: MediaHeader, options: VideoConfig) -> list[int]:
        """Frames in the middle of equal stretches of the clip."""
        wanted = options.num_frames
        if wanted is None:
            rated = (
                self.num_frames if options.fps is None else int(header.num_frames / header.frames_per_s * options.fps)
            )
            wanted = min(max(rated, options.min_frames or 1), options.max_frames or header.num_frames)
        count = min(wanted, header.num_frames)
        stretch = header.num_frames / count
        # Rounded to float32 first, as its video processor counts: it decides where a middle falls between two frames.
        return [int(np.float32(stretch / 2 + index * stretch)) for index in range(count)]

    def frame_tile(self, width: int, height: int) -> Tile:
        """The whole frame, its ratio of sides given up."""
        return Tile(resized=(self.tile_size,))

    def modules(self) -> Mapping[str, torch.nn.Module]:
        """Tower and projector."""
        from encoder.towers.stock import stock_class, stock_config

        vision = stock_config("internvl", "InternVLVisionConfig", self.vision)
        sizes = SimpleNamespace(
            vision_config=vision,
            text_config=SimpleNamespace(hidden_size=self.hidden_size),
            downsample_ratio=0.5,
            projector_hidden_act=self.config.get("projector_hidden_act", "gelu"),
        )
        return {
            "vision_tower.": stock_class("internvl", "InternVLVisionModel")(vision),
            "multi_modal_projector.": stock_class("internvl", "InternVLMultiModalProjector")(sizes),
        }

    def bind(self, modules: Mapping[str, Any]) -> Callable[[torch.Tensor], torch.Tensor]:
        """Patches without the class token, four to a token, projected."""
        tower, projector = modules["vision_tower."], modules["multi_modal_projector."]
        half = self.grid[1] // 2
        skipped = 0 if self.config.get("vision_feature_select_strategy", "default") == "full" else 1

        def forward(pixels: torch.Tensor) -> torch.Tensor:
            features = tower(pixels).last_hidden_state[:, skipped:]
            squares = features.unflatten(1, (half, 2, half, 2)).transpose(2, 3)
            tokens: torch.Tensor = projector(squares.flatten(3).flatten(1, 2))
            return tokens

        return forward


def _make(config: Mapping[str, Any], name: str, encoder: EncoderConfig) -> ClipTileAdapter:
    return ClipTileAdapter(InternVL(config, name, max_tiles=encoder.max_slice_nums), config, name, encoder)


def _config(vision: Mapping[str, Any], text: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["InternVLForConditionalGeneration"],
        "model_type": "internvl",
        "text_config": {"model_type": "qwen2", **text},
        "vision_config": {"model_type": "internvl_vision", "attention_bias": True, "norm_type": "layer_norm", **vision},
    }


_TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
_300M = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}

FAMILY = Family(
    model_types=("internvl",),
    presets={
        "tiny-internvl": Preset(
            config=_config(
                {**_TINY, "image_size": [56, 56], "patch_size": [14, 14]},
                {**_TINY, "num_key_value_heads": 2, "vocab_size": 99},
            ),
            summary="InternVL, 2 small layers, tiles of 56 pixels, seeded random weights",
            token_rule="4 a tile, 1 to 13 tiles",
        ),
        "random-internvl3-8b": Preset(
            config=_config({**_300M, "image_size": [448, 448], "patch_size": [14, 14]}, {"hidden_size": 3584}),
            summary="InternVL3 8B, released size, seeded random weights",
            token_rule="256 a tile, 1 to 13 tiles",
        ),
    },
    make=_make,
    settings=("max_slice_nums",),
)
