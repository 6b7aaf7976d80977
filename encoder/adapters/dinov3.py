"""DINOv3's vision transformer: one image of one size, square or not, tokens for patches, or the class token."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from PIL import Image

from encoder.adapters.cutting import Tile
from encoder.adapters.processors import IMAGENET, read_pixels, read_size
from encoder.adapters.registry import Family, Preset
from encoder.adapters.stock_families import Pixels
from encoder.adapters.tiles import TileAdapter
from encoder.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from encoder.config import EncoderConfig

_DEFAULTS = {"hidden_size": 384, "patch_size": 16, "num_register_tokens": 0}
_PIXELS = Pixels(mean=IMAGENET.mean, std=IMAGENET.std, resample=Image.Resampling.BILINEAR)


class DinoV3:
    """Implements `TileFamily`."""

    renames = ((r"^model\.layer\.", "layer."),)

    def __init__(self, config: Mapping[str, Any], name: str, *, pooled: bool) -> None:
        """Raises ConfigError for a size of images that is no number of patches."""
        self.vision = {**_DEFAULTS, **config}
        self.pooled = pooled
        self.tile_size = read_size(config, "size", 224)
        patch_size = self.vision["patch_size"]
        if any(side % patch_size for side in self.tile_size):
            raise ConfigError(f"{name}: images of {self.tile_size} pixels are no whole patches of {patch_size}")
        self.grid = (1, self.tile_size[1] // patch_size, self.tile_size[0] // patch_size)
        self.num_tokens = 1 if pooled else self.grid[1] * self.grid[2]
        self.hidden_size = self.vision["hidden_size"]
        self.pixels = read_pixels(config, _PIXELS)

    def cut(self, width: int, height: int) -> list[Tile]:
        """The whole image, its ratio of sides given up."""
        return [Tile(resized=(self.tile_size,))]

    def modules(self) -> Mapping[str, torch.nn.Module]:
        """The tower."""
        from encoder.towers.stock import stock_class, stock_config

        config = stock_config("dinov3_vit", "DINOv3ViTConfig", self.vision)
        return {"": stock_class("dinov3_vit", "DINOv3ViTModel")(config)}

    def bind(self, modules: Mapping[str, Any]) -> Callable[[torch.Tensor], torch.Tensor]:
        """Normed features of the patches, or of the class token."""
        tower, (width, height) = modules[""], self.tile_size
        # Once, outside any capture: transformers keeps them in a cache that may let them go.
        rotary = tower.rope_embeddings(tower.norm.weight.new_empty(1, 3, height, width))
        chosen = slice(1) if self.pooled else slice(1 + self.vision["num_register_tokens"], None)

        def forward(pixels: torch.Tensor) -> torch.Tensor:
            encoded = tower.model(tower.embeddings(pixels), position_embeddings=rotary).last_hidden_state
            normed: torch.Tensor = tower.norm(encoded[:, chosen])
            return normed

        return forward


def _make(config: Mapping[str, Any], name: str, encoder: EncoderConfig) -> TileAdapter:
    return TileAdapter(DinoV3(config, name, pooled=encoder.output == "pooled"), config, name, encoder)


def _config(**sizes: int) -> dict[str, Any]:
    return {"architectures": ["DINOv3ViTModel"], "model_type": "dinov3_vit", "num_register_tokens": 4, **sizes}


_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")

FAMILY = Family(
    model_types=("dinov3_vit",),
    outputs=("patches", "pooled"),
    presets={
        "tiny-dinov3": Preset(
            config=_config(**dict(zip(_SIZES, (64, 128, 2, 2), strict=True)))
            | {"preprocessor_config": {"size": {"height": 48, "width": 64}}},
            summary="DINOv3, 2 small layers, 64x48 pixels, seeded random weights",
            token_rule="12 an image, 1 pooled",
        ),
        "random-dinov3-vitl16": Preset(
            config=_config(**dict(zip(_SIZES, (1024, 4096, 24, 16), strict=True))),
            summary="DINOv3 ViT-L/16 at 224 pixels, released size, seeded random weights",
            token_rule="196 an image, 1 pooled",
        ),
    },
    make=_make,
)
