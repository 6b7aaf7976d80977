"""GLM-4.1V, GLM-4.5V and GLM-4.6V: images and frames at their own ratio, bicubic positions, a token for 28x28 pixels.

Two frames of a clip share their patches and are a segment; their times are the language model's matter.
"""

# Shapes: P patches, D tower width, T tokens.

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from encoder.adapters.cutting import Tile
from encoder.adapters.frame_indices import frame_indices
from encoder.adapters.glm4v_frames import choose_frames
from encoder.adapters.grid_clips import ClipGridAdapter
from encoder.adapters.interpolation import bicubic_taps
from encoder.adapters.processors import (
    CLIP,
    clip_processor_of,
    processor_of,
    read_pixels,
    vision_config,
)
from encoder.adapters.registry import Family, Preset
from encoder.adapters.smart_resize import resize_volume
from encoder.adapters.stock_families import Rows, Table
from encoder.types import Grid

if TYPE_CHECKING:
    import torch

    from encoder.config import EncoderConfig, VideoConfig
    from encoder.media import MediaHeader

_DEFAULTS = {"out_hidden_size": 4096, "image_size": 336, "patch_size": 14, "spatial_merge_size": 2}


class Glm4v:
    """Implements `ClipGridFamily`."""

    renames: tuple[tuple[str, str], ...] = ()
    inner_order = ()
    pooled_patches = 0
    tables: ClassVar[dict[str, Table]] = {
        "places": ((2,), "int32"),
        "taps": ((16,), "int32"),
        "tap_weights": ((16,), "float32"),
    }

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        self.vision = vision_config(config, _DEFAULTS)
        self.patch_size, self.merge = self.vision["patch_size"], self.vision["spatial_merge_size"]
        self.frames_together = self.frames_a_patch = self.vision.get("temporal_patch_size", 2)
        self.hidden_size = self.vision["out_hidden_size"]
        self.pixels = read_pixels(config, CLIP)
        self.image_pixels = _pixel_range(processor_of(config), 28 * 28 * 15_000)
        self.clip = clip_processor_of(config)
        self.clip_pixels = _pixel_range(self.clip, 28 * 28 * 60_000)

    def cut(self, width: int, height: int) -> list[Tile]:
        """The whole image, resized to whole tokens. Raises BadMediaError for a side over 200 times the other."""
        return [self._whole(width, height, self.frames_a_patch, self.image_pixels)]

    def cut_frame(self, width: int, height: int, num_frames: int) -> list[Tile]:
        """The whole frame; all frames together have a bound. Raises BadMediaError as `cut` does."""
        return [self._whole(width, height, num_frames, self.clip_pixels)]

    def _whole(self, width: int, height: int, num_frames: int, pixels: tuple[int, int]) -> Tile:
        size = resize_volume(
            width,
            height,
            num_frames,
            together=self.frames_a_patch,
            factor=self.patch_size * self.merge,
            least=pixels[0],
            most=pixels[1],
            model="GLM-4V",
        )
        return Tile(resized=(size,))

    def frame_numbers(self, header: MediaHeader, options: VideoConfig) -> list[int]:
        """As `choose_frames` says."""
        return choose_frames(header.num_frames, header.frames_per_s, options, self.clip, self.frames_together)

    def rows(self, grid: Grid) -> Mapping[str, np.ndarray]:
        """Row and column of each patch, and how the table of positions is read there."""
        _, rows, columns = grid
        places = frame_indices(rows, columns, self.merge, 0)
        taps, weights = bicubic_taps(rows, columns, self.merge, self.vision["image_size"] // self.patch_size)
        return {
            "places": np.stack([places.rows_P, places.columns_P], axis=1),
            "taps": taps,
            "tap_weights": weights,
        }

    def modules(self) -> Mapping[str, torch.nn.Module]:
        """The tower, which merges and projects too."""
        from encoder.towers.stock import stock_class, stock_config

        config = stock_config("glm4v", "Glm4vVisionConfig", self.vision)
        return {"model.visual.": stock_class("glm4v", "Glm4vVisionModel")(config)}

    def bind(self, modules: Mapping[str, Any]) -> Callable[[Rows], torch.Tensor]:
        """The tower by its parts: as a whole it finds each patch's image by comparing with all of them."""
        from torch.nn.functional import linear

        from encoder.kernels.gather import add_weighted_rows_
        from encoder.towers.stock import PatchEmbedding

        tower = modules["model.visual."]
        embed = PatchEmbedding(tower.patch_embed.proj, self.pixels)
        table = tower.embeddings.position_embedding.weight
        # A convolution over the patches of a token, which follow one another: a linear layer.
        downsample = tower.downsample.weight.permute(0, 2, 3, 1).flatten(1), tower.downsample.bias

        def forward(rows: Rows) -> torch.Tensor:
            x_PD = tower.post_conv_layernorm(embed(rows.pixels_PC))
            rotary = tower.rotary_pos_emb(x_PD, rows.tables["places"])
            add_weighted_rows_(x_PD, table, rows.tables["taps"], rows.tables["tap_weights"])
            for block in tower.blocks:
                x_PD = block(x_PD, cu_seqlens=rows.cu_seqlens, max_seqlen=len(x_PD), position_embeddings=rotary)
            squares = tower.post_layernorm(x_PD).unflatten(0, (-1, self.merge**2)).flatten(1)
            tokens: torch.Tensor = tower.merger(linear(squares, *downsample))
            return tokens

        return forward


def _pixel_range(settings: Mapping[str, Any], most: int) -> tuple[int, int]:
    size = settings.get("size") or {}
    return size.get("shortest_edge", 112 * 112), size.get("longest_edge", most)


def _make(config: Mapping[str, Any], name: str, encoder: EncoderConfig) -> ClipGridAdapter:
    return ClipGridAdapter(Glm4v(config, name), config, name, encoder)


def _config(vision: Mapping[str, Any], text: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["Glm4vForConditionalGeneration"],
        "model_type": "glm4v",
        "text_config": {"model_type": "glm4v_text", **text},
        "vision_config": {"model_type": "glm4v_vision", **vision},
    }


_TINY_TEXT = {
    "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": 99, "pad_token_id": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 2, 2],
                        "partial_rotary_factor": 0.5},
}  # fmt: skip
_TINY = {
    "hidden_size": 64,
    "depth": 2,
    "num_heads": 2,
    "out_hidden_size": 48,
    "intermediate_size": 96,
    "image_size": 84,
}
_FULL = {"hidden_size": 1536, "depth": 24, "num_heads": 12, "out_hidden_size": 4096, "intermediate_size": 13696}

FAMILY = Family(
    model_types=("glm4v", "glm4v_moe"),
    presets={
        "tiny-glm4v": Preset(
            config=_config({**_TINY, "image_size": 84}, _TINY_TEXT)
            | {
                "preprocessor_config": {"size": {"shortest_edge": 56 * 56, "longest_edge": 2 * 140 * 140}},
                "video_preprocessor_config": {"size": {"shortest_edge": 56 * 56, "longest_edge": 20 * 140 * 140}},
            },
            summary="GLM-4.1V, 2 small layers, up to 140x140 pixels, seeded random weights",
            token_rule="1 for 28x28 pixels, 2 to 25; of two frames, up to 250 a clip",
        ),
        "random-glm4v-9b": Preset(
            config=_config({**_FULL, "image_size": 336}, {"hidden_size": 4096}),
            summary="GLM-4.1V 9B, released size, seeded random weights",
            token_rule="1 for 28x28 pixels, 8 to 7500; of two frames, up to 30000 a clip",
        ),
    },
    make=_make,
)
