"""Kimi-K2.5's tower (MoonViT): images and frames at their own ratio, never enlarged, padded to tokens of 28x28 pixels.

Up to four frames of a clip attend to each other and give the tokens of one (`kimi_k25_clips.py`).
"""

# Shapes: P patches, D tower width, T tokens.

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from encoder.adapters.cutting import Tile
from encoder.adapters.frame_indices import frame_indices
from encoder.adapters.interpolation import bicubic_taps
from encoder.adapters.kimi_k25_clips import choose_frames
from encoder.adapters.processors import (
    HALF,
    clip_processor_of,
    processor_of,
    read_pixels,
    text_width,
    vision_config,
)
from encoder.adapters.stock_families import Rows, Table
from encoder.adapters.tile_kind import Size
from encoder.errors import ConfigError
from encoder.types import Grid

if TYPE_CHECKING:
    import torch

    from encoder.config import VideoConfig
    from encoder.media import MediaHeader

_DEFAULTS = {"hidden_size": 1152, "patch_size": 14, "pos_emb_height": 64, "pos_emb_width": 64, "pos_emb_time": 4}


class KimiK25:
    """Implements `ClipGridFamily`."""

    renames = (
        (r"^vision_tower\.(layers|final_layernorm)", r"vision_tower.encoder.\1"),
        (r"\.encoder\.layers\.", ".encoder.blocks."),
        (r"(blocks\.\d+)\.norm1", r"\1.norm0"),
        (r"(blocks\.\d+)\.norm2", r"\1.norm1"),
        (r"\.mlp\.fc1", ".mlp.fc0"),
        (r"\.mlp\.fc2", ".mlp.fc1"),
        (r"\.attn\.proj", ".wo"),
        (r"\.attn\.wqkv", ".wqkv"),
        (r"\.position_embeddings$", ".weight"),
        (r"^mm_projector\.in_proj", "mm_projector.proj.0"),
        (r"^mm_projector\.out_proj", "mm_projector.proj.2"),
    )
    inner_order = ()
    pooled_patches = 0
    merge = 2
    frames_a_patch = 1
    tables: ClassVar[dict[str, Table]] = {
        "places": ((2,), "int32"),
        "taps": ((16,), "int32"),
        "tap_weights": ((16,), "float32"),
    }

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        """Raises ConfigError for tables of positions that are not square or too short in time, and other merges."""
        self.vision, self.config = vision_config(config, _DEFAULTS), config
        self.side = self.vision["pos_emb_height"]
        if self.side != self.vision["pos_emb_width"] or list(self.vision.get("merge_kernel_size", [2, 2])) != [2, 2]:
            raise ConfigError(f"{name}: only square tables of positions and two by two patches a token are supported")
        self.patch_size = self.vision["patch_size"]
        self.hidden_size = text_width(config, name)
        settings = processor_of(config)
        self.pixels = read_pixels(config, HALF)
        self.bounds = settings.get("max_patches", 16_384), (settings.get("size") or {}).get("max_height", 512)
        self.clip = clip = clip_processor_of(config)
        self.frame_bounds = clip.get("max_patches", 4096), (clip.get("size") or {}).get("max_height", 512)
        self.frames_together = clip.get("temporal_patch_size", 4)
        if self.frames_together > self.vision["pos_emb_time"]:
            raise ConfigError(f"{name}: {self.frames_together} frames together, its tower has times for fewer")

    def cut(self, width: int, height: int) -> list[Tile]:
        """The whole image, and black to the right and below up to whole tokens."""
        return [self._whole(width, height, *self.bounds)]

    def cut_frame(self, width: int, height: int, num_frames: int) -> list[Tile]:
        """The whole frame, likewise, with a bound of its own."""
        return [self._whole(width, height, *self.frame_bounds)]

    def _whole(self, width: int, height: int, most: int, most_a_side: int) -> Tile:
        resized = _fit(width, height, self.patch_size, most, most_a_side)
        side = self.patch_size * self.merge
        padded = (-(-resized[0] // side) * side, -(-resized[1] // side) * side)
        return Tile(resized=(resized,), size=padded)

    def frame_numbers(self, header: MediaHeader, options: VideoConfig) -> list[int]:
        """Two a second, spread evenly."""
        return choose_frames(header.num_frames, header.frames_per_s, options, self.clip)

    def rows(self, grid: Grid) -> Mapping[str, np.ndarray]:
        """Row and column of each patch, and how the table of positions is read there; the same for each frame."""
        places = frame_indices(grid[1], grid[2], self.merge, 0)
        taps, weights = bicubic_taps(grid[1], grid[2], self.merge, self.side)
        frame = {"places": np.stack([places.rows_P, places.columns_P], axis=1), "taps": taps, "tap_weights": weights}
        return {name: np.tile(rows, (grid[0], 1)) for name, rows in frame.items()}

    def modules(self) -> Mapping[str, torch.nn.Module]:
        """Tower and projector, with queries, keys and values fused as they are released."""
        import torch

        from encoder.towers.stock import stock_class, stock_config

        vision = stock_config("kimi_k25", "Kimi_K25VisionConfig", self.vision)
        sizes = SimpleNamespace(
            vision_config=vision,
            text_config=SimpleNamespace(hidden_size=self.hidden_size),
            projection_hidden_size=self.config.get("projection_hidden_size", vision.hidden_size),
            projection_layer_norm_eps=self.config.get("projection_layer_norm_eps", 1e-5),
        )
        tower = stock_class("kimi_k25", "Kimi_K25VisionModel")(vision)
        for layer in tower.layers:
            for name in ("q_proj", "k_proj", "v_proj"):
                delattr(layer.attn, name)
            layer.attn.wqkv = torch.nn.Linear(vision.hidden_size, 3 * vision.hidden_size)
        return {
            "vision_tower.": tower,
            "mm_projector.": stock_class("kimi_k25", "Kimi_K25MultimodalProjection")(sizes),
        }

    def bind(self, modules: Mapping[str, Any]) -> Callable[[Rows], torch.Tensor]:
        """The tower by its parts: as a whole it counts patches on the host, to average the frames of clips."""
        from encoder.kernels.gather import add_weighted_rows_
        from encoder.towers.kimi_k25 import pool_frames, unfuse
        from encoder.towers.stock import PatchEmbedding

        tower, projector = modules["vision_tower."], modules["mm_projector."]
        for layer in tower.layers:
            unfuse(layer.attn)
        embed = PatchEmbedding(tower.patch_embed.proj, self.pixels)
        table = tower.patch_embed.pos_emb.position_embeddings.flatten(0, 1)
        times = tower.patch_embed.pos_emb.time_position_embeddings.to(table.dtype)

        def forward(rows: Rows) -> torch.Tensor:
            x_PD = embed(rows.pixels_PC)
            add_weighted_rows_(x_PD, table, rows.tables["taps"], rows.tables["tap_weights"])
            if "frames" in rows.tables:
                x_PD += times[rows.tables["frames"]]
            rotary = tower.rotary_emb(x_PD, rows.tables["places"])
            for layer in tower.layers:
                x_PD = layer(x_PD, cu_seqlens=rows.cu_seqlens, max_seqlen=len(x_PD), position_embeddings=rotary)
            x_PD = pool_frames(tower.final_layernorm(x_PD), rows.tables)
            squares = x_PD.unflatten(0, (-1, self.merge**2))
            tokens: torch.Tensor = projector(squares).squeeze(1)
            return tokens

        return forward


def _fit(width: int, height: int, patch_size: int, most: int, most_a_side: int) -> Size:
    """The image's own size, or less for its number of patches or a side. After `navit_resize` in transformers."""
    patches = max(1.0, height // patch_size) * max(1.0, width // patch_size)
    longest = most_a_side * patch_size
    scale = min(1.0, math.sqrt(most / patches), longest / height, longest / width)
    return min(max(1, int(width * scale)), longest), min(max(1, int(height * scale)), longest)
