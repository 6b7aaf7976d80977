"""CLIP's image encoder: the middle of an image at one size, tokens for patches or one in the space shared with text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from encoder.adapters.cutting import Tile
from encoder.adapters.processors import CLIP, processor_of, read_pixels, read_size, vision_config
from encoder.adapters.registry import Family, Preset
from encoder.adapters.tiles import TileAdapter
from encoder.errors import BadMediaError, ConfigError

if TYPE_CHECKING:
    import torch

    from encoder.config import EncoderConfig

MAX_RATIO = 200  # of the sides, as for other families; CLIP's own processor tries any

_DEFAULTS = {"hidden_size": 768, "image_size": 224, "patch_size": 32}
_PROJECTED = ("CLIPModel", "CLIPVisionModelWithProjection")


class Clip:
    """Implements `TileFamily`."""

    renames: tuple[tuple[str, str], ...] = ()

    def __init__(self, config: Mapping[str, Any], name: str, *, pooled: bool) -> None:
        """Raises ConfigError where the processor cuts another size than the tower takes."""
        self.vision = vision_config(config, _DEFAULTS)
        self.pooled = pooled
        self.projected = bool({*_PROJECTED} & {*config.get("architectures", ())})
        self.projection = config.get("projection_dim", 512)
        side = self.vision["image_size"]
        self.tile_size = read_size(config, "crop_size", side)
        self.shortest_edge = min(read_size(config, "size", side))
        if self.tile_size != (side, side) or self.shortest_edge < side or not _crops(config):
            raise ConfigError(f"{name}: its processor does not cut {side}x{side} pixels, which its tower takes")
        self.grid = (1, side // self.vision["patch_size"], side // self.vision["patch_size"])
        self.num_tokens = 1 if pooled else self.grid[1] * self.grid[2]
        self.hidden_size = self.projection if pooled and self.projected else self.vision["hidden_size"]
        self.pixels = read_pixels(config, CLIP)

    def cut(self, width: int, height: int) -> list[Tile]:
        """The middle of the image, resized by its shortest edge.

        Raises BadMediaError for one that would become gigabytes of pixels before its middle is cut out.
        """
        if max(width, height) > MAX_RATIO * min(width, height):
            raise BadMediaError(
                f"picture of {width}x{height}: one side is over {MAX_RATIO} times the other, "
                f"too thin to resize it by its shorter side as CLIP does; crop it"
            )
        longest_edge = int(self.shortest_edge * max(width, height) / min(width, height))
        resized = (self.shortest_edge, longest_edge) if width <= height else (longest_edge, self.shortest_edge)
        left, top = ((side - cut) // 2 for side, cut in zip(resized, self.tile_size, strict=True))
        return [Tile(resized=(resized,), corner=(left, top))]

    def modules(self) -> Mapping[str, torch.nn.Module]:
        """The tower, and the projection into the space shared with text."""
        import torch

        from encoder.towers.stock import stock_class, stock_config

        config = stock_config("clip", "CLIPVisionConfig", self.vision)
        modules = {"vision_model.": stock_class("clip", "CLIPVisionModel")(config)}
        if self.projected:
            modules["visual_projection."] = torch.nn.Linear(self.vision["hidden_size"], self.projection, bias=False)
        return modules

    def bind(self, modules: Mapping[str, Any]) -> Callable[[torch.Tensor], torch.Tensor]:
        """Features of patches as the last layer leaves them, or the normed and projected class token."""
        tower, projection = modules["vision_model."], modules.get("visual_projection.", lambda pooled: pooled)
        if self.pooled:
            return lambda pixels: projection(tower(pixels).pooler_output)[:, None]
        return lambda pixels: tower(pixels).last_hidden_state[:, 1:]


def _crops(config: Mapping[str, Any]) -> bool:
    return all(processor_of(config).get(step, True) for step in ("do_resize", "do_center_crop"))


def _make(config: Mapping[str, Any], name: str, encoder: EncoderConfig) -> TileAdapter:
    return TileAdapter(Clip(config, name, pooled=encoder.output == "pooled"), config, name, encoder)


def _config(vision: Mapping[str, Any], text: Mapping[str, Any], projection: int) -> dict[str, Any]:
    return {
        "architectures": ["CLIPModel"],
        "model_type": "clip",
        "projection_dim": projection,
        "text_config": {"model_type": "clip_text_model", **text},
        "vision_config": {"model_type": "clip_vision_model", **vision},
    }


_TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
_TEXT = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
_LARGE = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}

FAMILY = Family(
    model_types=("clip", "clip_vision_model"),
    outputs=("patches", "pooled"),
    presets={
        "tiny-clip": Preset(
            config=_config({**_TINY, "image_size": 56, "patch_size": 14}, {**_TINY, "vocab_size": 99}, 32),
            summary="CLIP, 2 small layers, 56 pixels, seeded random weights",
            token_rule="16 an image, 1 pooled",
        ),
        "random-clip-vit-large-patch14-336": Preset(
            config=_config({**_LARGE, "image_size": 336, "patch_size": 14}, _TEXT, 768),
            summary="CLIP ViT-L/14 at 336 pixels, released size, seeded random weights",
            token_rule="576 an image, 1 pooled",
        ),
    },
    make=_make,
)
