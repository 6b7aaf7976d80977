"""MiniCPM-V 4.6: slices as in its elders, a tower that shrinks four to one after its seventh layer, no resampler.

Patches of a token follow one another window by window, so that the windows the tower attends in are four rows each, and
both of its merges are reshapes.
"""

# Shapes: P patches, D tower width, W windows of four patches, T tokens of four windows.

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from encoder.adapters.cutting import Tile
from encoder.adapters.frame_indices import frame_indices
from encoder.adapters.minicpmv46_frames import MAX_FRAMES, choose_frames
from encoder.adapters.minicpmv_slicing import plan_slices
from encoder.adapters.processors import (
    HALF,
    clip_processor_of,
    processor_of,
    read_pixels,
    text_width,
    vision_config,
)
from encoder.adapters.stock_families import Rows, Table
from encoder.errors import ConfigError
from encoder.types import Grid

if TYPE_CHECKING:
    import torch

    from encoder.config import VideoConfig
    from encoder.media import MediaHeader

_DEFAULTS = {"hidden_size": 768, "image_size": 224, "patch_size": 16}


class MiniCPMV46:
    """Implements `ClipGridFamily`."""

    renames: tuple[tuple[str, str], ...] = ()
    pooled_patches = 0
    merge = 4
    frames_together = frames_a_patch = 1  # a frame is sliced as an image is
    inner_order = (0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15)  # two by two windows of two by two patches
    tables: ClassVar[dict[str, Table]] = {"position_ids": ((), "int32")}

    def __init__(self, config: Mapping[str, Any], name: str, *, max_slices: int | None) -> None:
        """Raises ConfigError for other ways of merging."""
        settings = processor_of(config)
        mode = settings.get("downsample_mode") or config.get("downsample_mode", "16x")
        if mode != "16x" or config.get("merger_times", 1) != 1 or config.get("merge_kernel_size", [2, 2]) != [2, 2]:
            raise ConfigError(f"{name}: only 16 patches a token are supported, not mode {mode!r}")
        self.vision = {**vision_config(config, _DEFAULTS), "insert_layer_id": config.get("insert_layer_id", 6)}
        self.patch_size = self.vision["patch_size"]
        self.hidden_size = text_width(config, name)
        self.pixels = read_pixels(config, HALF)
        self.resolution = settings.get("scale_resolution", 448)
        self.max_slices = max_slices or _max_slices(settings)
        self.clip = clip_processor_of(config)
        self.max_frame_slices = max_slices or _max_slices(self.clip)

    def frame_numbers(self, header: MediaHeader, options: VideoConfig) -> list[int]:
        """One a second, at most 128."""
        return choose_frames(
            header.num_frames, header.frames_per_s, options, most=self.clip.get("max_num_frames") or MAX_FRAMES
        )

    def cut(self, width: int, height: int) -> list[Tile]:
        """The overview, then slices row by row; all of whole tokens."""
        return self._pieces(width, height, self.max_slices)

    def cut_frame(self, width: int, height: int, num_frames: int) -> list[Tile]:
        """As an image is cut, with the video processor's number of slices."""
        return self._pieces(width, height, self.max_frame_slices)

    def _pieces(self, width: int, height: int, most: int) -> list[Tile]:
        return plan_slices(
            width,
            height,
            max_slice_nums=most,
            scale_resolution=self.resolution,
            patch_size=self.patch_size * self.merge,
        ).tiles

    def rows(self, grid: Grid) -> Mapping[str, np.ndarray]:
        """Each patch's row of the table of positions."""
        return {"position_ids": _position_ids(grid, self.vision["image_size"] // self.patch_size)}

    def modules(self) -> Mapping[str, torch.nn.Module]:
        """Tower and merger."""
        from encoder.towers.stock import stock_class, stock_config

        vision = stock_config("minicpmv4_6", "MiniCPMV4_6VisionConfig", self.vision)
        sizes = SimpleNamespace(
            vision_config=vision,
            text_config=SimpleNamespace(hidden_size=self.hidden_size),
            merge_kernel_size=(2, 2),
            merger_times=1,
        )
        return {
            "model.vision_tower.": stock_class("minicpmv4_6", "MiniCPMV4_6VisionModel")(vision),
            "model.merger.": stock_class("minicpmv4_6", "MiniCPMV4_6Merger")(sizes),
        }

    def bind(self, modules: Mapping[str, Any]) -> Callable[[Rows], torch.Tensor]:
        """The tower by its parts: as a whole it finds windows and merges image by image."""
        from encoder.towers.minicpmv46 import merge_windows
        from encoder.towers.stock import PatchEmbedding

        tower, merger = modules["model.vision_tower."], modules["model.merger."]
        embed = PatchEmbedding(tower.embeddings.patch_embedding, self.pixels)
        shrinks = tower.config.insert_layer_id

        def forward(rows: Rows) -> torch.Tensor:
            x_PD = embed(rows.pixels_PC) + tower.embeddings.position_embedding(rows.tables["position_ids"])
            x_1PD, offsets = x_PD[None], rows.cu_seqlens
            for index, layer in enumerate(tower.encoder.layers):
                x_1PD = layer(x_1PD, None, cu_seqlens=offsets, max_seqlen=x_1PD.shape[1])
                if index == shrinks:
                    x_1PD = merge_windows(tower.vit_merger, x_1PD[0])[None]
                    offsets = offsets // 4
            features_WD = tower.post_layernorm(x_1PD)[0]
            tokens: torch.Tensor = merger.mlp[0](features_WD.unflatten(0, (-1, 4)).flatten(1))
            return tokens

        return forward


@lru_cache(maxsize=256)
def _position_ids(grid: Grid, side: int) -> np.ndarray:
    """The table's row nearest to each patch's place in the image; float32, as transformers divides and compares."""
    _, rows, columns = grid
    boundaries = np.arange(1 / side, 1.0, 1 / side).astype(np.float32)

    def buckets(size: int) -> np.ndarray:
        places = np.arange(size, dtype=np.float32) / np.float32(size)
        return np.searchsorted(boundaries, places, side="right").astype(np.int32)

    places = frame_indices(rows, columns, MiniCPMV46.merge, 0)
    ids = buckets(rows)[places.rows_P] * side + buckets(columns)[places.columns_P]
    return np.ascontiguousarray(ids.reshape(-1, 16)[:, MiniCPMV46.inner_order]).ravel()


def _max_slices(settings: Mapping[str, Any]) -> int:
    return int(settings.get("max_slice_nums", 9)) if settings.get("slice_mode", True) else 1
