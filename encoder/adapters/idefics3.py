"""Idefics3: an image enlarged to whole tiles, each tile, and the whole image as one more tile."""

# Shapes: N tiles, P patches of a tile, D tower width.

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from PIL import Image

from encoder.adapters.cutting import Tile, grid_of_tiles
from encoder.adapters.processors import longest_edge, processor_of, read_pixels, text_width, vision_config
from encoder.adapters.registry import Family, Preset
from encoder.adapters.stock_families import Pixels
from encoder.adapters.tile_kind import Size
from encoder.adapters.tiles import TileAdapter
from encoder.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from encoder.config import EncoderConfig

_DEFAULTS = {"hidden_size": 1152, "image_size": 224, "patch_size": 32}
_CLASSES = {"idefics3": "Idefics3", "smolvlm": "SmolVLM"}
LONGEST = 4096  # pixels of an edge that is never exceeded


class Idefics3:
    """Implements `TileFamily`."""

    renames: tuple[tuple[str, str], ...] = ()

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        """Raises ConfigError for tiles that are no whole squares of patches."""
        self.kind = config["model_type"]
        self.vision, self.config = vision_config(config, _DEFAULTS), config
        settings = processor_of(config)
        side = longest_edge(settings, "max_image_size", self.vision["image_size"])
        self.longest = longest_edge(settings, "size", 4 * side)
        self.splits = settings.get("do_image_splitting", True)
        self.tile_size = (side, side)
        patch_size, self.scale = self.vision["patch_size"], config.get("scale_factor", 2)
        if side % (patch_size * self.scale):
            raise ConfigError(f"{name}: tiles of {side} pixels are no whole squares of {self.scale} patches")
        self.grid = (1, side // patch_size, side // patch_size)
        self.num_tokens = self.grid[1] * self.grid[2] // self.scale**2
        self.hidden_size = text_width(config, name)
        self.pixels = read_pixels(config, Pixels(resample=Image.Resampling.LANCZOS))

    def cut(self, width: int, height: int) -> list[Tile]:
        """Tiles row by row, then the whole image, which is resized from what the tiles were cut from."""
        side = self.tile_size[0]
        first = fit_longest(width, height, self.longest)
        if not self.splits:
            return [Tile(resized=(first, self.tile_size))]
        second = _whole_tiles(*first, side)
        tiles = grid_of_tiles((first, second), self.tile_size)
        return tiles if len(tiles) == 1 else [*tiles, Tile(resized=(first, second, self.tile_size))]

    def modules(self) -> Mapping[str, torch.nn.Module]:
        """Tower and connector."""
        from encoder.towers.stock import stock_class, stock_config

        kind, title = self.kind, _CLASSES[self.kind]
        vision = stock_config(kind, f"{title}VisionConfig", self.vision)
        sizes = SimpleNamespace(
            vision_config=vision,
            text_config=SimpleNamespace(hidden_size=self.hidden_size),
            scale_factor=self.scale,
        )
        return {
            "model.vision_model.": stock_class(kind, f"{title}VisionTransformer")(vision),
            "model.connector.": stock_class(kind, f"{title}Connector")(sizes),
        }

    def bind(self, modules: Mapping[str, Any]) -> Callable[[torch.Tensor], torch.Tensor]:
        """The tower by its parts: as a whole it builds a mask of nothing, which takes a host sync."""
        tower, connector = modules["model.vision_model."], modules["model.connector."]
        embeddings = tower.embeddings
        ids_P = self._position_ids().to(tower.post_layernorm.weight.device)

        def forward(pixels: torch.Tensor) -> torch.Tensor:
            patches_NPD = embeddings.patch_embedding(pixels).flatten(2).transpose(1, 2)
            x_NPD = patches_NPD + embeddings.position_embedding(ids_P)
            encoded_NPD = tower.encoder(inputs_embeds=x_NPD, attention_mask=None).last_hidden_state
            tokens: torch.Tensor = connector(tower.post_layernorm(encoded_NPD))
            return tokens

        return forward

    def _position_ids(self) -> torch.Tensor:
        """Each patch's row of the table: its place as a fraction of the tile, in float32, looked up among the table's.

        transformers 5.17 rounds the fractions to the dtype of the pixels first, which moves ids in bfloat16.
        """
        import torch

        table_side = self.vision["image_size"] // self.vision["patch_size"]
        boundaries = torch.arange(1 / table_side, 1.0, 1 / table_side)
        places = torch.arange(self.grid[1], dtype=torch.float32) * (1.0 / torch.tensor(self.grid[1]))
        buckets = torch.bucketize(places.clamp(max=1.0 - 1e-6), boundaries, right=True)
        ids: torch.Tensor = (buckets[:, None] * table_side + buckets).flatten()
        return ids


def fit_longest(width: int, height: int, longest: int) -> Size:
    """The size whose longer edge is `longest`, the other even; never beyond 4,096 pixels."""
    ratio = width / height
    if width >= height:
        width, height = longest, max(1, int(longest / ratio) + int(longest / ratio) % 2)
    else:
        width, height = max(1, int(longest * ratio) + int(longest * ratio) % 2), longest
    if max(width, height) <= LONGEST:
        return width, height
    ratio = width / height
    if width >= height:
        return LONGEST, max(1, int(LONGEST / ratio))
    return max(1, int(LONGEST * ratio)), LONGEST


def _whole_tiles(width: int, height: int, side: int) -> Size:
    """The longer edge enlarged to whole tiles, the other after it and then to whole tiles too."""
    ratio = width / height
    if width >= height:
        width = math.ceil(width / side) * side
        return width, math.ceil(int(width / ratio) / side) * side
    height = math.ceil(height / side) * side
    return math.ceil(int(height * ratio) / side) * side, height


def _make(config: Mapping[str, Any], name: str, encoder: EncoderConfig) -> TileAdapter:
    return TileAdapter(Idefics3(config, name), config, name, encoder)


def released_config(
    kind: str, scale: int, vision: Mapping[str, Any], text: Mapping[str, Any], longest: int
) -> dict[str, Any]:
    """A `config.json` of this model type, with what its image processor needs."""
    return {
        "architectures": [f"{_CLASSES[kind]}ForConditionalGeneration"],
        "model_type": kind,
        "scale_factor": scale,
        "text_config": {"model_type": "llama", **text},
        "vision_config": {"model_type": f"{kind}_vision", **vision},
        "preprocessor_config": {
            "size": {"longest_edge": longest},
            "max_image_size": {"longest_edge": vision["image_size"]},
        },
    }


TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
TINY_TEXT = {**TINY, "num_key_value_heads": 2, "vocab_size": 99, "pad_token_id": 0}
_SO400M = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}

FAMILY = Family(
    model_types=("idefics3",),
    presets={
        "tiny-idefics3": Preset(
            config=released_config("idefics3", 2, {**TINY, "image_size": 56, "patch_size": 14}, TINY_TEXT, 112),
            summary="Idefics3, 2 small layers, tiles of 56 pixels, seeded random weights",
            token_rule="4 a tile, 3 to 5 tiles",
        ),
        "random-idefics3-8b": Preset(
            config=released_config(
                "idefics3", 2, {**_SO400M, "image_size": 364, "patch_size": 14}, {"hidden_size": 4096}, 1456
            ),
            summary="Idefics3 8B, released size, seeded random weights",
            token_rule="169 a tile, 5 to 17 tiles",
        ),
    },
    make=_make,
)
