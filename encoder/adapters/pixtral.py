"""Pixtral's tower: in Pixtral 12B (a Llava config) a token a patch, in Mistral Small 3 a token for four."""

# Shapes: P patches, D tower width, T tokens.

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from encoder.adapters.cutting import Tile
from encoder.adapters.frame_indices import frame_indices
from encoder.adapters.grids import GridAdapter
from encoder.adapters.processors import CLIP, processor_of, read_pixels, text_width, vision_config
from encoder.adapters.registry import Family, Preset
from encoder.adapters.stock_families import Rows, Table
from encoder.errors import BadMediaError, ConfigError
from encoder.types import Grid

if TYPE_CHECKING:
    import torch

    from encoder.config import EncoderConfig

_WHOLE = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
_LLAVA = {"vision_feature_layer": -2, "vision_feature_select_strategy": "default"}  # where a config leaves them out
_DEFAULTS = {"hidden_size": 1024, "image_size": 1024, "patch_size": 16}


class Pixtral:
    """Implements `GridFamily`."""

    renames: tuple[tuple[str, str], ...] = ()
    inner_order = ()
    pooled_patches = 0
    tables: ClassVar[dict[str, Table]] = {"places": ((2,), "int32")}

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        """Raises ConfigError for another tower, or features of another layer than the last."""
        self.vision, self.config = vision_config(config, _DEFAULTS), config
        if self.vision.get("model_type") != "pixtral":
            raise ConfigError(f"{name}: a {config['model_type']} model is read with Pixtral's tower alone")
        self.kind = config["model_type"]
        features = {**(_LLAVA if self.kind == "llava" else _WHOLE), **config}
        if any(features[key] != value for key, value in _WHOLE.items()):
            raise ConfigError(f"{name}: only features of the last layer, of all patches, are supported")
        self.patch_size = self.vision["patch_size"]
        self.merge = config.get("spatial_merge_size", 2) if self.kind == "mistral3" else 1
        self.hidden_size = text_width(config, name)
        self.pixels = read_pixels(config, CLIP)
        self.longest = (processor_of(config).get("size") or {}).get("longest_edge", self.vision["image_size"])

    def cut(self, width: int, height: int) -> list[Tile]:
        """The whole image within the longest edge, enlarged to whole tokens.

        Raises BadMediaError where the shorter edge comes to no pixel, which the released processor cannot resize.
        """
        came, ratio = f"{width}x{height}", max(width, height) / self.longest
        if ratio > 1:
            width, height = math.floor(width / ratio), math.floor(height / ratio)
        if min(width, height) < 1:
            raise BadMediaError(
                f"picture of {came}: nothing is left of its shorter side when the longer one is resized to "
                f"{self.longest} pixels, as Pixtral's processor does; crop it"
            )
        side = self.patch_size * self.merge
        return [Tile(resized=((((width - 1) // side + 1) * side, ((height - 1) // side + 1) * side),))]

    def rows(self, grid: Grid) -> Mapping[str, np.ndarray]:
        """Row and column of each patch."""
        indices = frame_indices(grid[1], grid[2], self.merge, 0)
        return {"places": np.stack([indices.rows_P, indices.columns_P], axis=1)}

    def modules(self) -> Mapping[str, torch.nn.Module]:
        """Tower and projector."""
        from encoder.towers.stock import stock_class, stock_config

        vision = stock_config("pixtral", "PixtralVisionConfig", self.vision)
        sizes = SimpleNamespace(
            vision_config=vision,
            text_config=SimpleNamespace(
                hidden_size=self.hidden_size, rms_norm_eps=self.config["text_config"].get("rms_norm_eps", 1e-6)
            ),
            vision_feature_layer=-1,
            spatial_merge_size=self.merge,
            projector_hidden_act=self.config.get("projector_hidden_act", "gelu"),
            multimodal_projector_bias=self.config.get("multimodal_projector_bias", self.kind == "llava"),
        )
        title = {"llava": "Llava", "mistral3": "Mistral3"}[self.kind]
        return {
            "vision_tower.": stock_class("pixtral", "PixtralVisionModel")(vision),
            "multi_modal_projector.": stock_class(self.kind, f"{title}MultiModalProjector")(sizes),
        }

    def bind(self, modules: Mapping[str, Any]) -> Callable[[Rows], torch.Tensor]:
        """The tower by its parts; where patches are merged they follow one another already."""
        from encoder.towers.stock import PatchEmbedding

        tower, projector = modules["vision_tower."], modules["multi_modal_projector."]
        embed = PatchEmbedding(tower.patch_conv, self.pixels)

        def forward(rows: Rows) -> torch.Tensor:
            x_1PD = tower.ln_pre(embed(rows.pixels_PC))[None]
            rotary = tower.patch_positional_embedding(x_1PD, rows.tables["places"])
            features_PD = tower.transformer(x_1PD, position_embeddings=rotary).last_hidden_state[0]
            if self.kind == "mistral3":
                normed = projector.norm(features_PD).unflatten(0, (-1, self.merge**2))
                features_PD = projector.patch_merger.merging_layer(normed.transpose(1, 2).flatten(1))
            tokens: torch.Tensor = projector.linear_2(projector.act(projector.linear_1(features_PD)))
            return tokens

        return forward


def _make(config: Mapping[str, Any], name: str, encoder: EncoderConfig) -> GridAdapter:
    return GridAdapter(Pixtral(config, name), config, name, encoder)


def _config(kind: str, vision: Mapping[str, Any], text: Mapping[str, Any], longest: int) -> dict[str, Any]:
    own = {"llava": {"vision_feature_select_strategy": "full", "image_seq_length": 1}, "mistral3": {}}[kind]
    return {
        "architectures": ["LlavaForConditionalGeneration" if kind == "llava" else "Mistral3ForConditionalGeneration"],
        "model_type": kind,
        "vision_feature_layer": -1,
        **own,
        "text_config": {"model_type": "mistral", "rms_norm_eps": 1e-5, **text},
        "vision_config": {
            "model_type": "pixtral",
            "rope_parameters": {"rope_theta": 10_000.0, "rope_type": "axial"},
            **vision,
        },
        "preprocessor_config": {"size": {"longest_edge": longest}},
    }


_TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
_TINY_TEXT = {**_TINY, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 99}
_FULL = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}

FAMILY = Family(
    model_types=("llava", "mistral3"),
    presets={
        "tiny-pixtral": Preset(
            config=_config("llava", {**_TINY, "image_size": 128, "patch_size": 16}, _TINY_TEXT, 128),
            summary="Pixtral, 2 small layers, up to 128 pixels, seeded random weights",
            token_rule="1 for 16x16 pixels, up to 64",
        ),
        "tiny-mistral-small-3": Preset(
            config=_config("mistral3", {**_TINY, "image_size": 140, "patch_size": 14}, _TINY_TEXT, 140),
            summary="Mistral Small 3.1, 2 small layers, up to 140 pixels, seeded random weights",
            token_rule="1 for 28x28 pixels, up to 25",
        ),
        "random-pixtral-12b": Preset(
            config=_config("llava", {**_FULL, "image_size": 1024, "patch_size": 16}, {"hidden_size": 5120}, 1024),
            summary="Pixtral 12B, released size, seeded random weights",
            token_rule="1 for 16x16 pixels, up to 4096",
        ),
        "random-mistral-small-3.1": Preset(
            config=_config("mistral3", {**_FULL, "image_size": 1540, "patch_size": 14}, {"hidden_size": 5120}, 1540),
            summary="Mistral Small 3.1, released size, seeded random weights",
            token_rule="1 for 28x28 pixels, up to 3025",
        ),
    },
    make=_make,
)
