"""MiniCPM-V 2.5, 2.6 and 4.0: slices of about 1024 patches, a SigLIP-shaped tower, a resampler of Q tokens a slice."""

# Shapes: P patches of a run, S segments, C numbers of a patch (588), E width of an output token.

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from encoder.adapters.base import CaptureAxis, EncoderModel, Segment, TensorSpec
from encoder.adapters.minicpmv_slicing import SlicePlan, plan_slices
from encoder.adapters.registry import Family, Preset
from encoder.errors import ConfigError
from encoder.types import AxisKeys, Capacity, Grid, ItemShape, SegmentShape

if TYPE_CHECKING:
    import torch

    from encoder.config import EncoderConfig
    from encoder.media import MediaHeader

PACKED = "packed"
VLLM_LAYOUTS = ("<=32x32", "<=32x64", "<=64x32", "<=70x70")
_LAYOUT = re.compile(r"(<=)?([1-9]\d*)x([1-9]\d*)")
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


@dataclass(frozen=True, slots=True)
class _Rectangle:
    rows: int
    columns: int
    exact: bool  # takes only its own grid, needs no mask

    @property
    def area(self) -> int:
        return self.rows * self.columns

    def admits(self, rows: int, columns: int) -> bool:
        if self.exact:
            return (rows, columns) == (self.rows, self.columns)
        return rows <= self.rows and columns <= self.columns


def _parse_layouts(layouts: Sequence[str]) -> dict[str, _Rectangle | None]:
    """Layout keys in order, each with its rectangle; None for the packed one."""
    parsed: dict[str, _Rectangle | None] = {}
    for name in [key for layout in layouts for key in (VLLM_LAYOUTS if layout == "vllm" else (layout,))]:
        match = _LAYOUT.fullmatch(name)
        if name == PACKED:
            parsed[name] = None
        elif match:
            parsed[name] = _Rectangle(int(match[2]), int(match[3]), exact=match[1] is None)
        else:
            raise ConfigError(
                f"unknown layout {name!r}; use 'packed', 'vllm', rows x columns of patches such as '24x43', "
                f"or '<=32x64' for every slice that fits"
            )
    return parsed


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
            raise ConfigError(
                f"{name}: hidden_size is {self.hidden_size}; the resampler's heads are 128 wide"
            )
        slicing = config.get("slice_config") or {}
        self.max_slice_nums: int = max_slice_nums or slicing.get("max_slice_nums", 9)
        self.scale_resolution: int = slicing.get("scale_resolution", 448)
        self.drop_last_layer: bool = config.get("drop_vision_last_layer", True)
        self.layer_norm_eps: float = vision.get("layer_norm_eps", 1e-6)
        self._config = dict(config)
        self._max_segments = max_segments
        self._layouts = _parse_layouts(layouts)
        self.axes = (CaptureAxis(name="layout", keys=tuple(self._layouts)),)
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
        choices = [
            (not rectangle.exact, rectangle.area, name)
            for name, rectangle in self._layouts.items()
            if rectangle is not None and rectangle.admits(rows, columns)
        ]
        keys: list[AxisKeys] = [(name,) for *_, name in sorted(choices)]
        return [*keys, (PACKED,)] if PACKED in self._layouts else keys

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
            ids, rows, columns = _indices(segment.shape.grid, self.table_side, self.version == "2.5")
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
        from encoder.towers.siglip import siglip_weight_shapes
        from encoder.towers.resampler import resampler_weight_shapes

        return siglip_weight_shapes(self) | resampler_weight_shapes(
            self.hidden_size, self.queries, self.width
        )

    def checkpoint_config(self) -> dict[str, Any]:
        """The config it was made from."""
        return dict(self._config)

    def build(
        self, weights: Mapping[str, torch.Tensor], device: torch.device, dtype: torch.dtype, attention: str
    ) -> EncoderModel:
        """Tower and resampler on the device."""
        from encoder.towers.minicpmv import MiniCPMVModel

        grids = {name: (r.rows, r.columns, r.exact) for name, r in self._layouts.items() if r is not None}
        return MiniCPMVModel(self, weights, grids, device, dtype, attention)


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


@lru_cache(maxsize=4096)
def _indices(grid: Grid, table_side: int, one_row: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Position ids, rows and columns of a slice's patches, int32 `[P]`."""
    _, num_rows, num_columns = grid
    rows, columns = np.divmod(np.arange(num_rows * num_columns, dtype=np.int32), np.int32(num_columns))
    return position_ids(num_rows, num_columns, table_side, one_row=one_row), rows, columns


def position_ids(rows: int, columns: int, table_side: int = 70, *, one_row: bool = False) -> np.ndarray:
    """Row of the tower's position table for each patch, int32 `[rows * columns]`.

    `one_row` is the rule of 2.5, whose released tower sees a slice as one row of patches.
    """
    if one_row:
        return _bucket(rows * columns, table_side)
    return (table_side * _bucket(rows, table_side)[:, None] + _bucket(columns, table_side)[None, :]).ravel()


def _bucket(count: int, table_side: int) -> np.ndarray:
    """Which of the table's buckets each of `count` equal steps of [0, 1) falls into, in float32 as released."""
    boundaries = np.arange(1 / table_side, 1.0, 1 / table_side).astype(np.float32)
    steps = np.arange(count, dtype=np.float32) * np.float32(1 / count)
    steps = np.minimum(steps, np.float32(1 - 1e-6))
    return np.searchsorted(boundaries, steps, side="right").astype(np.int32)


def _make(config: Mapping[str, Any], name: str, encoder: EncoderConfig) -> MiniCPMV:
    return MiniCPMV(
        config,
        name=name,
        layouts=encoder.layouts,
        max_slice_nums=encoder.max_slice_nums,
        max_segments=encoder.max_segments_per_graph,
    )


def _released(version: str, hidden_size: int, query_num: int, vision: Mapping[str, Any]) -> dict[str, Any]:
    """A `config.json` in the released layout."""
    return {
        "architectures": ["MiniCPMV"],
        "model_type": "minicpmv",
        "version": version if version == "2.5" else float(version),
        "hidden_size": hidden_size,
        "query_num": query_num,
        "image_size": 448,
        "patch_size": 14,
        "drop_vision_last_layer": False,
        "slice_config": {"max_slice_nums": 9, "patch_size": 14, "scale_resolution": 448},
        "vision_config": {
            "model_type": {"2.5": "idefics2", "2.6": "siglip"}.get(version, "siglip_vision_model"),
            "image_size": 980,
            "patch_size": 14,
            **vision,
        },
    }


_FULL = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}
_TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
_SIZES = {"2.5": (4096, 96), "2.6": (3584, 64), "4.0": (2560, 64)}  # of a token, and tokens a slice

FAMILY = Family(
    model_types=("minicpmv",),
    modalities=("image",),
    token_rule="64 a slice (96 for 2.5), 1 to 10 slices an image",
    presets={
        f"{size}-minicpmv-{version}": Preset(
            config=_released(version, 256 if size == "tiny" else width, queries, vision),
            summary=f"MiniCPM-V {version}, {text}, seeded random weights",
        )
        for size, vision, text in (("tiny", _TINY, "2 small layers"), ("random", _FULL, "released size"))
        for version, (width, queries) in _SIZES.items()
    },
    make=_make,
)
