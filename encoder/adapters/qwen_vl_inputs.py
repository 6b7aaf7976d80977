"""The input buffers of a Qwen-VL run, and how segments are laid into them."""

# Shapes: T tokens of a run, W windows, C numbers of a patch.

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from encoder.adapters.base import Segment, TensorSpec
from encoder.adapters.frame_indices import frame_indices
from encoder.adapters.interpolation import bilinear_taps
from encoder.adapters.packed import fill_offsets, fill_pixels, fill_rows
from encoder.adapters.qwen_vl_config import QwenSizes
from encoder.types import Capacity


def input_specs(sizes: QwenSizes, capacity: Capacity) -> dict[str, TensorSpec]:
    """Boundaries, rows and columns, what windows and position embeddings need where there are some, pixels."""
    patches = capacity.patches
    specs = {name: TensorSpec(shape=(patches,), dtype="int32") for name in ("rows", "columns")}
    specs["cu_seqlens"] = TensorSpec(shape=(capacity.segments + 1,), dtype="int32")
    if sizes.window_tokens:
        # A frame of h x w tokens has at most h * w / 2 + 1 windows of two tokens a side or more.
        windows = capacity.tokens // 2 + capacity.segments
        specs["cu_windows"] = TensorSpec(shape=(windows + 1,), dtype="int32")
        specs["places"] = TensorSpec(shape=(capacity.tokens,), dtype="int32")
    if sizes.table_side:
        specs["taps"] = TensorSpec(shape=(patches, 4), dtype="int32")
        specs["tap_weights"] = TensorSpec(shape=(patches, 4), dtype="float32")
    pixels = (patches, sizes.temporal_patch_size * sizes.frame_bytes)
    return specs | {"pixels": TensorSpec(shape=pixels, dtype="uint8")}


def fill_inputs(host: Mapping[str, np.ndarray], segments: Sequence[Segment], sizes: QwenSizes) -> int:
    """Lay the segments end to end; returns the patches in use."""
    grids = [segment.shape.grid[1:] for segment in segments]
    frames = [frame_indices(*grid, sizes.merge_size, sizes.window_tokens) for grid in grids]
    starts = np.cumsum([0] + [segment.shape.num_patches for segment in segments])
    fill_offsets(host["cu_seqlens"], starts[1:])
    fill_rows(host["rows"], [frame.rows_P for frame in frames])
    fill_rows(host["columns"], [frame.columns_P for frame in frames])
    if sizes.window_tokens:
        windows = np.concatenate([np.empty(0, np.int32), *(frame.window_patches_W for frame in frames)])
        fill_offsets(host["cu_windows"], np.cumsum(windows))
        firsts = starts // sizes.patches_per_token
        fill_rows(host["places"], [frame.places_T + first for frame, first in zip(frames, firsts, strict=False)])
    if sizes.table_side:
        taps = [bilinear_taps(*grid, sizes.merge_size, sizes.table_side) for grid in grids]
        fill_rows(host["taps"], [ids for ids, _ in taps])
        fill_rows(host["tap_weights"], [weights for _, weights in taps])
    return fill_pixels(host["pixels"], [segment.patches_PC for segment in segments])
