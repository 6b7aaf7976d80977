"""Gemma 3: an image of 896 pixels, and pieces of it where its processor pans and scans; 256 tokens each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from encoder.adapters.cutting import Tile
from encoder.adapters.processors import HALF_BILINEAR, processor_of, read_pixels, read_size, text_width, vision_config
from encoder.adapters.registry import Family, Preset
from encoder.adapters.tiles import TileAdapter
from encoder.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from encoder.config import EncoderConfig

_DEFAULTS = {"hidden_size": 768, "image_size": 224, "patch_size": 16, "layer_norm_eps": 1e-6}
# Released files have null.
_PAN_AND_SCAN: dict[str, Any] = {"min_crop_size": 256, "max_num_crops": 4, "min_ratio_to_activate": 1.2}


class Gemma3:
    """Implements `TileFamily`."""

    renames: tuple[tuple[str, str], ...] = ()

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        """Raises ConfigError for sizes that don't fit."""
        self.vision = {**vision_config(config, _DEFAULTS), "vision_use_head": False}
        side, patch_size = self.vision["image_size"], self.vision["patch_size"]
        self.num_tokens = config.get("mm_tokens_per_image", 256)
        self.tile_size = read_size(config, "size", side)
        if self.tile_size != (side, side) or (side // patch_size) % math.isqrt(self.num_tokens):
            raise ConfigError(f"{name}: images of {self.tile_size} pixels don't give {self.num_tokens} tokens")
        self.grid = (1, side // patch_size, side // patch_size)
        self.hidden_size = text_width(config, name)
        self.pixels = read_pixels(config, HALF_BILINEAR)
        settings = processor_of(config)
        self.pans = bool(settings.get("do_pan_and_scan"))
        self.least_side, self.most_pieces, self.least_ratio = (
            settings.get(f"pan_and_scan_{key}") or default for key, default in _PAN_AND_SCAN.items()
        )

    def cut(self, width: int, height: int) -> list[Tile]:
        """The whole image, its ratio of sides given up, then the crops of a long one."""
        whole = Tile(resized=(self.tile_size,))
        return [whole, *self._crops(width, height)] if self.pans else [whole]

    def _crops(self, width: int, height: int) -> list[Tile]:
        """Equal pieces along the longer side, where the image is long and the pieces are large enough."""
        long, short = max(width, height), min(width, height)
        if long / short < self.least_ratio:
            return []
        pieces = max(2, min(long // self.least_side, math.floor(long / short + 0.5)))
        pieces = min(self.most_pieces, pieces)
        step = math.ceil(long / pieces)
        if min(step, short) < self.least_side:
            return []
        spans = [(start, min(start + step, long)) for start in range(0, pieces * step, step)]
        boxes = [(a, 0, b, height) if width >= height else (0, a, width, b) for a, b in spans]
        return [Tile(resized=(self.tile_size,), box=box) for box in boxes]

    def modules(self) -> Mapping[str, torch.nn.Module]:
        """Tower and projector."""
        from encoder.towers.stock import stock_class, stock_config

        vision = stock_config("siglip", "SiglipVisionConfig", self.vision)
        sizes = SimpleNamespace(
            vision_config=vision,
            text_config=SimpleNamespace(hidden_size=self.hidden_size),
            mm_tokens_per_image=self.num_tokens,
        )
        return {
            "vision_tower.vision_model.": stock_class("siglip", "SiglipVisionModel")(vision),
            "multi_modal_projector.": stock_class("gemma3", "Gemma3MultiModalProjector")(sizes),
        }

    def bind(self, modules: Mapping[str, Any]) -> Callable[[torch.Tensor], torch.Tensor]:
        """Features averaged over squares of patches, normed and projected."""
        tower, projector = modules["vision_tower.vision_model."], modules["multi_modal_projector."]
        return lambda pixels: projector(tower(pixels).last_hidden_state)


def _make(config: Mapping[str, Any], name: str, encoder: EncoderConfig) -> TileAdapter:
    return TileAdapter(Gemma3(config, name), config, name, encoder)


def _config(vision: Mapping[str, Any], text: Mapping[str, Any], tokens: int) -> dict[str, Any]:
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "mm_tokens_per_image": tokens,
        "text_config": {"model_type": "gemma3_text", **text},
        "vision_config": {"model_type": "siglip_vision_model", "vision_use_head": False, **vision},
    }


_TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
_SO400M = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}

FAMILY = Family(
    model_types=("gemma3",),
    presets={
        "tiny-gemma3": Preset(
            config=_config(
                {**_TINY, "image_size": 56, "patch_size": 14},
                {**_TINY, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 99},
                4,
            ),
            summary="Gemma 3, 2 small layers, 56 pixels, seeded random weights",
            token_rule="4 an image",
        ),
        "random-gemma3-4b": Preset(
            config=_config({**_SO400M, "image_size": 896, "patch_size": 14}, {"hidden_size": 2560}, 256),
            summary="Gemma 3 4B, released size, seeded random weights",
            token_rule="256 an image",
        ),
    },
    make=_make,
)
