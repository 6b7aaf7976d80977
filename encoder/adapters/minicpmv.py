"""MiniCPM-V 2.5, 2.6 and 4.0: slices of about 1024 patches, a SigLIP-shaped tower, a resampler of Q tokens a slice."""

# Shapes: P patches of a run, S segments, C numbers of a patch (588), E width of an output token.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from encoder.adapters.base import CaptureAxis, EncoderModel, Segment, TensorSpec
from encoder.adapters.layouts import PACKED, parse_layouts, rectangle_choices
from encoder.adapters.minicpmv_positions import patch_indices
from encoder.adapters.minicpmv_slicing import SlicePlan, plan_slices
from encoder.errors import ConfigError
from encoder.types import AxisKeys, Capacity, Grid, ItemShape, SegmentShape

if TYPE_CHECKING:
    import torch

    from encoder.config import Precision
    from encoder.media import MediaHeader

_SEGMENT_LADDER = (
    1,
    2,
    3,
    4,
    5,
    6,
    7,
    8,
    9,
    10,
    12,
    16,
    24,
    32,
)  # an image has 1, 3, 4, 5, 6, 7, 9 or 10 slices
_CPU_SEGMENT_LADDER = (1, 3, 8)


class MiniCPMV:
    """Adapter of one MiniCPM-V checkpoint. Implements `EncoderAdapter`."""

    path = "image"

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        name: str,
        layouts: Sequence[str] = (PACKED,),
        max_slice_nums: int | None = None,
        max_segments: int | None = None,
    ) -> None:
        """Read a released `config.json`. Raises ConfigError for what is not MiniCPM-V 2.5, 2.6 or 4.0."""
        self.encoder = name
        self.version = _version(config)
        try:
            vision = config["vision_config"]
            self.width: int = vision["hidden_size"]
            self.mlp_width: int = vision["intermediate_size"]
            self.num_layers: int = vision["num_hidden_layers"]
            self.num_heads: int = vision["num_attention_heads"]
            self.patch_size: int = vision["patch_size"]
            self.table_side: int = vision["image_size"] // self.patch_size
            self.hidden_size: int = config["hidden_size"]
            self.queries: int = config["query_num"]
        except KeyError as error:
            raise ConfigError(f"{name}: config.json lacks {error.args[0]!r}, which MiniCPM-V needs") from None
        if self.hidden_size % 128:
            raise ConfigError(f"{name}: hidden_size is {self.hidden_size}; the resampler's heads are 128 wide")
        slicing = config.get("slice_config") or {}
        self.max_slice_nums: int = max_slice_nums or slicing.get("max_slice_nums", 9)
        self.scale_resolution: int = slicing.get("scale_resolution", 448)
        self.drop_last_layer: bool = config.get("drop_vision_last_layer", True)
        self.layer_norm_eps: float = vision.get("layer_norm_eps", 1e-6)
        self._config = dict(config)
        self._max_segments = max_segments
        self._layouts = parse_layouts(layouts)
        self.axes: tuple[CaptureAxis, ...] = (CaptureAxis(name="layout", keys=tuple(self._layouts)),)
        self._nominal_patches = (self.scale_resolution // self.patch_size) ** 2

    # Sizes

    def plan(self, width: int, height: int) -> SlicePlan:
        """The slices of an image of this size."""
        return plan_slices(
            width,
            height,
            max_slice_nums=self.max_slice_nums,
            scale_resolution=self.scale_resolution,
            patch_size=self.patch_size,
        )

    def _grids(self, plan: SlicePlan) -> tuple[Grid, ...]:
        sizes = [plan.overview]
        if plan.columns:
            sizes += [plan.slice_size] * (plan.columns * plan.rows)
        return tuple((1, height // self.patch_size, width // self.patch_size) for width, height in sizes)

    def probe(self, header: MediaHeader) -> ItemShape:
        """Slices of an image, overview first."""
        grids = self._grids(self.plan(header.width, header.height))
        return ItemShape(
            grids=grids,
            num_patches=sum(rows * columns for _, rows, columns in grids),
            num_tokens=len(grids) * self.queries,
        )

    def measure(self, grid: Grid) -> SegmentShape:
        """A slice gives Q tokens, whatever its grid."""
        frames, rows, columns = grid
        return SegmentShape(grid=grid, num_patches=frames * rows * columns, num_tokens=self.queries)

    # Preparation, on the CPU

    def prepare(self, image: Image.Image) -> list[Segment]:
        """Slices of an RGB image, overview first, resized with Pillow's bicubic filter as released."""
        plan = self.plan(*image.size)
        pictures = [np.asarray(image.resize(plan.overview, Image.Resampling.BICUBIC))]
        if plan.columns:
            refined = np.asarray(image.resize(plan.refined, Image.Resampling.BICUBIC))
            width, height = plan.slice_size
            pictures += [
                refined[top : top + height, left : left + width]
                for top in range(0, plan.refined[1], height)
                for left in range(0, plan.refined[0], width)
            ]
        return [self._segment(picture) for picture in pictures]

    def _segment(self, picture: np.ndarray) -> Segment:
        """Cut `[height, width, 3]` into patch rows, each in the order (y, x, channel) that copies fastest."""
        side = self.patch_size
        rows, columns = picture.shape[0] // side, picture.shape[1] // side
        patches = picture.reshape(rows, side, columns, side * 3).transpose(0, 2, 1, 3)
        return Segment(
            shape=self.measure((1, rows, columns)),
            patches_PC=np.ascontiguousarray(patches).reshape(rows * columns, side * side * 3),
        )

    # Graphs

    def axis_choices(self, grid: Grid) -> list[AxisKeys]:
        """The exact rectangle, then covering ones by area, then packed."""
        _, rows, columns = grid
        return [(key,) for key in rectangle_choices(self._layouts, rows, columns)]

    def capacity(self, axis_keys: AxisKeys, token_budget: int) -> Capacity:
        """Room for `token_budget // Q` slices of this layout."""
        segments = min(token_budget // self.queries, self._max_segments or token_budget)
        if segments < 1:
            raise ConfigError(
                f"{self.encoder}: token budget {token_budget} holds no slice of {self.queries} tokens; "
                f"use multiples of {self.queries}"
            )
        rectangle = self._layouts[str(axis_keys[0])]
        if rectangle is None:
            patches = packed_rows(segments, self._nominal_patches)
            longest = min(patches, self._nominal_patches * 5 // 4)
        else:
            patches, longest = segments * rectangle.area, rectangle.area
        return Capacity(patches=patches, segments=segments, tokens=segments * self.queries, longest=longest)

    def default_budgets(self, axis_keys: AxisKeys, device: str) -> tuple[int, ...]:
        """Every count of slices that one image gives, then larger steps; fewer for masked rectangles and CPUs."""
        if device == "cpu":
            ladder: tuple[int, ...] = _CPU_SEGMENT_LADDER
        elif axis_keys == (PACKED,):
            ladder = _SEGMENT_LADDER
        else:
            ladder = (1, 2, 4, 8, 16)
        if self._max_segments:
            ladder = tuple(n for n in ladder if n <= self._max_segments) or (self._max_segments,)
        return tuple(segments * self.queries for segments in ladder)

    def exact(self, shapes: Sequence[SegmentShape]) -> tuple[AxisKeys, Capacity]:
        """A packed run of just these slices; sizes that attention plans are made for are rounded up."""
        lengths = [shape.num_patches for shape in shapes]
        segments = 1 << (len(lengths) - 1).bit_length()
        return (PACKED,), Capacity(
            patches=sum(lengths),
            segments=segments,
            tokens=segments * self.queries,
            longest=-(-max(lengths) // 256) * 256,
        )

    def sample(self, axis_keys: AxisKeys) -> Segment:
        """A square slice, or one that fills its rectangle."""
        side = self.scale_resolution // self.patch_size
        rectangle = self._layouts[str(axis_keys[0])]
        rows, columns = (rectangle.rows, rectangle.columns) if rectangle else (side, side)
        pixels = np.random.default_rng(0).integers(0, 256, (rows * columns, self.patch_size**2 * 3), dtype=np.uint8)
        return Segment(shape=self.measure((1, rows, columns)), patches_PC=pixels)

    def inputs(self, axis_keys: AxisKeys, capacity: Capacity) -> dict[str, TensorSpec]:
        """Boundaries, position ids of the tower, row and column of each patch for the resampler, pixels."""
        per_patch = TensorSpec(shape=(capacity.patches,), dtype="int32")
        return {
            "cu_seqlens": TensorSpec(shape=(capacity.segments + 1,), dtype="int32"),
            "position_ids": per_patch,
            "rows": per_patch,
            "columns": per_patch,
            "pixels": TensorSpec(shape=(capacity.patches, self.patch_size**2 * 3), dtype="uint8"),
        }

    def fill(
        self,
        host: Mapping[str, np.ndarray],
        segments: Sequence[Segment],
        axis_keys: AxisKeys,
        capacity: Capacity,
    ) -> int:
        """Lay the slices end to end (packed), or each at the start of its own rectangle."""
        rectangle = self._layouts.get(str(axis_keys[0]))
        for name in ("position_ids", "rows", "columns"):
            host[name][:] = 0
        start = 0
        for index, segment in enumerate(segments):
            if rectangle is not None:
                start = index * rectangle.area
            end = start + segment.shape.num_patches
            ids, rows, columns = patch_indices(segment.shape.grid, self.table_side, self.version == "2.5")
            host["position_ids"][start:end] = ids
            host["rows"][start:end] = rows
            host["columns"][start:end] = columns
            host["pixels"][start:end] = segment.patches_PC
            start = end
        lengths = [segment.shape.num_patches for segment in segments]
        host["cu_seqlens"][0] = 0
        np.cumsum(lengths, out=host["cu_seqlens"][1 : len(lengths) + 1])
        host["cu_seqlens"][len(lengths) + 1 :] = sum(lengths)
        return start

    # Weights and model

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Released names (`vpm.*`, `resampler.*`) and their shapes."""
        from encoder.towers.resampler import resampler_weight_shapes
        from encoder.towers.siglip import siglip_weight_shapes

        return siglip_weight_shapes(self) | resampler_weight_shapes(self.hidden_size, self.queries, self.width)

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

        grids = {name: (r.rows, r.columns, r.exact) for name, r in self._layouts.items() if r is not None}
        return MiniCPMVModel(self, weights, grids, device, dtype, attention, precision)


def packed_rows(segments: int, nominal_patches: int) -> int:
    """Rows of a packed graph: slices are a little over or under nominal; many of them average out.

    A slice has at most 1056/1024 of the nominal patches up to an aspect ratio of 4, and 1028/1024 on average.
    Rounded up to whole GEMM tiles of 128 rows where that is less than 2 % of the rows.
    """
    rows = nominal_patches * 33 // 32 if segments <= 2 else nominal_patches * 81 // 80
    tile = 128 if segments * nominal_patches >= 6400 else 16
    return -(-segments * rows // tile) * tile


def _version(config: Mapping[str, Any]) -> str:
    """2.5, 2.6 or 4.0, from the key `version` or, in old copies, from the sizes."""
    if "version" in config:
        version = ".".join(f"{config['version']}.0".split(".")[:2])
    else:
        version = "2.0" if (config.get("hidden_size"), config.get("query_num")) == (2304, 64) else "2.5"
    if version not in ("2.5", "2.6", "4.0"):
        raise ConfigError(f"MiniCPM-V {version} is not supported; 2.5, 2.6 and 4.0 are")
    return version
