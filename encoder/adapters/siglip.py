"""SigLIP as a plain image encoder: one image of one size, tokens for patches or one from its attention pooling."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from encoder.adapters.cutting import Tile
from encoder.adapters.processors import HALF, read_pixels, read_size, vision_config
from encoder.adapters.registry import Family, Preset
from encoder.adapters.tiles import TileAdapter
from encoder.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from encoder.config import EncoderConfig

_DEFAULTS = {"hidden_size": 768, "image_size": 224, "patch_size": 16, "vision_use_head": True}


class Siglip:
    """Implements `TileFamily`."""

    renames: tuple[tuple[str, str], ...] = ()

    def __init__(self, config: Mapping[str, Any], name: str, *, pooled: bool) -> None:
        """Raises ConfigError where pooling is asked of a tower without a head."""
        self.vision = vision_config(config, _DEFAULTS)
        if pooled and not self.vision["vision_use_head"]:
            raise ConfigError(f"{name}: its tower has no pooling head; use output 'patches'")
        self.pooled = pooled
        side = self.vision["image_size"]
        self.tile_size = read_size(config, "size", side)
        if self.tile_size != (side, side):
            raise ConfigError(f"{name}: its processor makes {self.tile_size} pixels, its tower takes {side}x{side}")
        self.grid = (1, side // self.vision["patch_size"], side // self.vision["patch_size"])
        self.num_tokens = 1 if pooled else self.grid[1] * self.grid[2]
        self.hidden_size = self.vision["hidden_size"]
        self.pixels = read_pixels(config, HALF)

    def cut(self, width: int, height: int) -> list[Tile]:
        """The whole image, its ratio of sides given up."""
        return [Tile(resized=(self.tile_size,))]

    def modules(self) -> Mapping[str, torch.nn.Module]:
        """The tower with its pooling head."""
        from encoder.towers.stock import stock_class, stock_config

        config = stock_config("siglip", "SiglipVisionConfig", self.vision)
        return {"vision_model.": stock_class("siglip", "SiglipVisionModel")(config)}

    def bind(self, modules: Mapping[str, Any]) -> Callable[[torch.Tensor], torch.Tensor]:
        """Normed features, or what the head makes of them."""
        tower = modules["vision_model."]
        tower.use_head = self.pooled
        if self.pooled:
            return lambda pixels: tower(pixels).pooler_output[:, None]
        return lambda pixels: tower(pixels).last_hidden_state


def _make(config: Mapping[str, Any], name: str, encoder: EncoderConfig) -> TileAdapter:
    return TileAdapter(Siglip(config, name, pooled=encoder.output == "pooled"), config, name, encoder)


def _config(vision: Mapping[str, Any], text: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["SiglipModel"],
        "model_type": "siglip",
        "text_config": {"model_type": "siglip_text_model", **text},
        "vision_config": {"model_type": "siglip_vision_model", **vision},
    }


_TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
_SO400M = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}

FAMILY = Family(
    model_types=("siglip", "siglip_vision_model"),
    outputs=("patches", "pooled"),
    presets={
        "tiny-siglip": Preset(
            config=_config({**_TINY, "image_size": 70, "patch_size": 14}, {**_TINY, "vocab_size": 99}),
            summary="SigLIP, 2 small layers, 70 pixels, seeded random weights",
            token_rule="25 an image, 1 pooled",
        ),
        "random-siglip-so400m-patch14-384": Preset(
            config=_config({**_SO400M, "image_size": 384, "patch_size": 14}, _SO400M),
            summary="SigLIP SO400M at 384 pixels, released size, seeded random weights",
            token_rule="729 an image, 1 pooled",
        ),
    },
    make=_make,
)
