"""MiniCPM-V 2.5 to 4.5: slices of about 1024 patches, a SigLIP-shaped tower, a resampler of Q tokens a slice."""

# Shapes: P patches of a run, S segments, C numbers of a patch (588), E width of an output token.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from encoder.adapters.base import CaptureAxis, EncoderModel, Segment, TensorSpec
from encoder.adapters.cutting import cut_out, patch_rows, size_of
from encoder.adapters.layouts import PACKED, SegmentLayouts
from encoder.adapters.minicpmv_config import read_sizes
from encoder.adapters.minicpmv_positions import patch_indices
from encoder.adapters.minicpmv_slicing import SlicePlan, plan_slices
from encoder.adapters.packed import fill_offsets
from encoder.helpers import copy_all
from encoder.types import AxisKeys, Capacity, Grid, ItemShape, SegmentShape

if TYPE_CHECKING:
    import torch

    from encoder.config import EncoderConfig, Precision
    from encoder.media import MediaHeader

LADDER = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 16, 24, 32)  # slices; an image has 1, 3, 4, 5, 6, 7, 9 or 10
RECTANGLE_LADDER = (1, 2, 4, 8, 16)
CPU_LADDER = (1, 3, 8)


class MiniCPMV:
    """Adapter of one MiniCPM-V checkpoint. Implements `EncoderAdapter`."""

    path = "image"

    def __init__(self, config: Mapping[str, Any], *, name: str, encoder: EncoderConfig) -> None:
        """Read a released `config.json`. Raises ConfigError for what is no MiniCPM-V that is known."""
        self.encoder = name
        self.sizes = sizes = read_sizes(config, name)
        self.hidden_size = sizes.token_width
        self.max_slice_nums = encoder.max_slice_nums or sizes.max_slice_nums
        self.layouts = SegmentLayouts(
            encoder.layouts,
            tokens=sizes.queries,
            nominal_patches=sizes.nominal_patches,
            max_segments=encoder.max_segments_per_graph,
        )
        self.axes: tuple[CaptureAxis, ...] = (CaptureAxis(name="layout", keys=self.layouts.keys),)
        self._config = dict(config)

    # Sizes

    def plan(self, width: int, height: int, max_slice_nums: int | None = None) -> SlicePlan:
        """The slices of an image of this size; at most `max_slice_nums` instead of as many as an image may have."""
        return plan_slices(
            width,
            height,
            max_slice_nums=max_slice_nums or self.max_slice_nums,
            scale_resolution=self.sizes.scale_resolution,
            patch_size=self.sizes.patch_size,
        )

    def probe(self, header: MediaHeader) -> ItemShape:
        """Slices of an image, overview first."""
        side = self.sizes.patch_size
        sizes = map(size_of, self.plan(header.width, header.height).tiles)
        return ItemShape.of([self.measure((1, height // side, width // side)) for width, height in sizes])

    def measure(self, grid: Grid) -> SegmentShape:
        """A slice gives Q tokens, whatever its grid."""
        frames, rows, columns = grid
        return SegmentShape(grid=grid, num_patches=frames * rows * columns, num_tokens=self.sizes.queries)

    # Preparation, on the CPU

    def prepare(self, image: Image.Image) -> list[Segment]:
        """Slices of an RGB image, overview first, resized with Pillow's bicubic filter as released."""
        tiles = self.plan(*image.size).tiles
        return [self._segment([picture]) for picture in cut_out(image, tiles, Image.Resampling.BICUBIC)]

    def _segment(self, frames: Sequence[np.ndarray], times: tuple[int, ...] = ()) -> Segment:
        """Frames `[height, width, 3]` in patch rows, each in the order (y, x, channel) that copies fastest."""
        side = self.sizes.patch_size
        height, width, _ = frames[0].shape
        parts = [patch_rows(frame, side)[:, 0] for frame in frames]
        return Segment(
            shape=self.measure((len(frames), height // side, width // side)),
            patches_PC=parts[0] if len(parts) == 1 else np.concatenate(parts),
            times=times,
        )

    # Graphs

    def axis_choices(self, grid: Grid) -> list[AxisKeys]:
        """The exact rectangle, then covering ones by area, then packed."""
        return self.layouts.choices(grid)

    def capacity(self, axis_keys: AxisKeys, token_budget: int) -> Capacity:
        """Room for `token_budget // Q` slices of this layout."""
        return self.layouts.capacity(axis_keys, token_budget)

    def default_budgets(self, axis_keys: AxisKeys, device: str) -> tuple[int, ...]:
        """Every count of slices that one image gives, then larger steps; fewer for rectangles and CPUs."""
        ladder = LADDER if axis_keys == (PACKED,) else RECTANGLE_LADDER
        return self.layouts.budgets(CPU_LADDER if device == "cpu" else ladder)

    def exact(self, shapes: Sequence[SegmentShape]) -> tuple[AxisKeys, Capacity]:
        """A packed run of just these slices."""
        return self.layouts.exact(shapes)

    def sample(self, axis_keys: AxisKeys) -> Segment:
        """A square slice, or one that fills its rectangle."""
        side = self.sizes.scale_resolution // self.sizes.patch_size
        rectangle = self.layouts.rectangles[str(axis_keys[0])]
        rows, columns = (rectangle.rows, rectangle.columns) if rectangle else (side, side)
        pixels = np.random.default_rng(0).integers(0, 256, (rows * columns, self.sizes.patch_bytes), dtype=np.uint8)
        return Segment(shape=self.measure((1, rows, columns)), patches_PC=pixels)

    def inputs(self, axis_keys: AxisKeys, capacity: Capacity) -> dict[str, TensorSpec]:
        """Boundaries, position ids of the tower, row and column of each patch for the resampler, pixels."""
        per_patch = TensorSpec(shape=(capacity.patches,), dtype="int32")
        return {
            "cu_seqlens": TensorSpec(shape=(capacity.segments + 1,), dtype="int32"),
            "position_ids": per_patch,
            "rows": per_patch,
            "columns": per_patch,
            "pixels": TensorSpec(shape=(capacity.patches, self.sizes.patch_bytes), dtype="uint8"),
        }

    def fill(
        self,
        host: Mapping[str, np.ndarray],
        segments: Sequence[Segment],
        axis_keys: AxisKeys,
        capacity: Capacity,
    ) -> int:
        """Lay the slices end to end (packed), or each at the start of its own rectangle."""
        for name in ("position_ids", "rows", "columns"):
            host[name][:] = 0
        lengths = [segment.shape.num_patches for segment in segments]
        places = self.layouts.rows(axis_keys, lengths)
        one_row = self.sizes.version == "2.5"
        for segment, place in zip(segments, places, strict=True):
            ids, rows, columns = patch_indices(segment.shape.grid, self.sizes.table_side, one_row)
            host["position_ids"][place] = ids
            host["rows"][place] = rows
            host["columns"][place] = columns
        copy_all([(host["pixels"][place], each.patches_PC) for each, place in zip(segments, places, strict=True)])
        fill_offsets(host["cu_seqlens"], np.cumsum(lengths))
        return int(places[-1].stop)

    # Weights and model

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Released names (`vpm.*`, `resampler.*`) and their shapes."""
        from encoder.towers.resampler import resampler_weight_shapes
        from encoder.towers.siglip import siglip_weight_shapes

        return siglip_weight_shapes(self.sizes) | resampler_weight_shapes(
            self.hidden_size, self.sizes.queries, self.sizes.width
        )

    def checkpoint_config(self) -> dict[str, Any]:
        """The config it was made from."""
        return dict(self._config)

    def build(
        self,
        weights: Mapping[str, torch.Tensor],
        device: torch.device,
        dtype: torch.dtype,
        attention: str,
        precision: Precision,
    ) -> EncoderModel:
        """Tower and resampler on the device."""
        from encoder.towers.minicpmv import MiniCPMVModel

        model = MiniCPMVModel(self.sizes, self.layouts.rectangles, weights, device, dtype, attention)
        if precision == "fp8":
            model.quantise(self)
        return model
