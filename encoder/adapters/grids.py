"""Encoders of transformers that take an image at its own ratio of sides: patches of any grids, packed end to end.

`GridAdapter` does everything that such families share; a family says the rest in a `GridFamily`. Whatever depends on
a grid alone (positions, interpolation weights) is a table with a row for each patch, made on the host and kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from encoder.adapters.base import CaptureAxis, EncoderModel, Segment, TensorSpec
from encoder.adapters.cutting import cut_out, patch_rows, size_of
from encoder.adapters.packed import PackedLayout, fill_offsets, fill_pixels, fill_rows
from encoder.adapters.stock import StockAdapter
from encoder.adapters.stock_families import GridFamily
from encoder.adapters.tile_kind import CPU_LADDER, LADDER
from encoder.types import AxisKeys, Capacity, Grid, ItemShape, SegmentShape

if TYPE_CHECKING:
    import torch

    from encoder.config import EncoderConfig
    from encoder.media import MediaHeader

SAMPLE_SIDE = 16  # patches


class GridAdapter(StockAdapter):
    """Adapter of one checkpoint of a grid family. Implements `EncoderAdapter`."""

    family: GridFamily

    path = "image"

    def __init__(self, family: GridFamily, config: Mapping[str, Any], name: str, encoder: EncoderConfig) -> None:
        """Raises ConfigError for layouts other than the packed one."""
        self.encoder, self.family = name, family
        self.hidden_size = family.hidden_size
        self.layout = PackedLayout(
            encoder.layouts,
            name,
            patches_per_token=family.pooled_patches or family.merge**2,
            max_segments=encoder.max_segments_per_graph,
            **({"tokens_a_segment": 1} if family.pooled_patches else {}),
        )
        self.axes: tuple[CaptureAxis, ...] = self.layout.axes
        self._config = dict(config)
        self.patch_bytes = 3 * family.patch_size**2

    def measure(self, grid: Grid) -> SegmentShape:
        """One token for each square of patches, whatever the frames, or for all of them."""
        frames, rows, columns = grid
        tokens = 1 if self.family.pooled_patches else rows * columns // self.family.merge**2
        return SegmentShape(grid=grid, num_patches=frames * rows * columns, num_tokens=tokens)

    def probe(self, header: MediaHeader) -> ItemShape:
        """Sizes of the pieces."""
        sizes = [size_of(piece) for piece in self.family.cut(header.width, header.height)]
        side = self.family.patch_size
        return self.shape_of([(1, height // side, width // side) for width, height in sizes])

    def shape_of(self, grids: Sequence[Grid]) -> ItemShape:
        """Of an item of segments of these grids."""
        return ItemShape.of([self.measure(grid) for grid in grids])

    def prepare(self, image: Image.Image) -> list[Segment]:
        """Pieces of an RGB image."""
        pictures = cut_out(image, self.family.cut(*image.size), self.family.pixels.resample)
        return [self._segment(picture) for picture in pictures]

    def _segment(self, picture: np.ndarray) -> Segment:
        side = self.family.patch_size
        shape = self.measure((1, picture.shape[0] // side, picture.shape[1] // side))
        return Segment(shape=shape, patches_PC=self.cut_patches(picture))

    def cut_patches(self, picture: np.ndarray) -> np.ndarray:
        """Patch rows (y, x, channel) of `[height, width, 3]`, the patches of a token after one another."""
        tokens = patch_rows(picture, self.family.patch_size, self.family.merge)
        if self.family.inner_order:
            tokens = tokens[:, self.family.inner_order]
        return tokens.reshape(-1, tokens.shape[2])

    def axis_choices(self, grid: Grid) -> list[AxisKeys]:
        """Packed, whatever the grid."""
        return list(self.layout.choices)

    def capacity(self, axis_keys: AxisKeys, token_budget: int) -> Capacity:
        """Room for `token_budget` tokens of any grids."""
        return self.layout.capacity(token_budget)

    def default_budgets(self, axis_keys: AxisKeys, device: str) -> tuple[int, ...]:
        """Up to the largest images; fewer on a CPU."""
        if self.family.pooled_patches:
            return CPU_LADDER if device == "cpu" else LADDER
        return self.layout.default_budgets(device)

    def exact(self, shapes: Sequence[SegmentShape]) -> tuple[AxisKeys, Capacity]:
        """A run of just these segments."""
        return self.layout.exact(shapes)

    def sample(self, axis_keys: AxisKeys, *, scale: int = 1) -> Segment:
        """A small square of noise. Budgets below its tokens are measured empty: they cost what their launches do."""
        side = SAMPLE_SIDE * scale * self.family.patch_size
        return self._segment(np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8))

    def inputs(self, axis_keys: AxisKeys, capacity: Capacity) -> dict[str, TensorSpec]:
        """Boundaries, the family's tables, pixels."""
        tables = {
            name: TensorSpec(shape=(capacity.patches, *shape), dtype=dtype)
            for name, (shape, dtype) in self.family.tables.items()
        }
        return {
            "cu_seqlens": TensorSpec(shape=(capacity.segments + 1,), dtype="int32"),
            **tables,
            "pixels": TensorSpec(shape=(capacity.patches, self.patch_bytes), dtype="uint8"),
        }

    def fill(
        self,
        host: Mapping[str, np.ndarray],
        segments: Sequence[Segment],
        axis_keys: AxisKeys,
        capacity: Capacity,
    ) -> int:
        """Lay the segments end to end."""
        fill_offsets(host["cu_seqlens"], np.cumsum([segment.shape.num_patches for segment in segments]))
        tables = [self.family.rows(segment.shape.grid) for segment in segments]
        for name in self.family.tables:
            fill_rows(host[name], [rows[name] for rows in tables])
        return fill_pixels(host["pixels"], [segment.patches_PC for segment in segments])

    def _model(
        self, weights: Mapping[str, torch.Tensor], device: torch.device, dtype: torch.dtype, attention: str
    ) -> EncoderModel:
        from encoder.towers.stock import GridModel

        return GridModel(self.family, weights, device, dtype, attention)
