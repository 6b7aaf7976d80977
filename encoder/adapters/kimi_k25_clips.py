"""Kimi-K2.5's clips: frames four by four, which attend to each other and give the average of their features as tokens.

Graphs differ along an axis of modality: those of clips have room for four times the patches for the same tokens, know
which frame a patch is of, and which patches are averaged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from encoder.adapters.base import CaptureAxis, Segment, TensorSpec
from encoder.adapters.grid_clips import ClipGridAdapter, ClipGridFamily
from encoder.adapters.packed import PackedLayout, fill_rows
from encoder.adapters.sampling import spread, within_bounds
from encoder.types import AxisKeys, Capacity, Grid, SegmentShape

if TYPE_CHECKING:
    from encoder.config import EncoderConfig, VideoConfig

FRAMES_PER_S = 2.0
IMAGE, VIDEO = ("image",), ("video",)
LADDER, CPU_LADDER = (256, 512, 1024, 2048, 4096), (128, 512)  # tokens of clips


class KimiAdapter(ClipGridAdapter):
    """Adapter of one Kimi-K2.5 checkpoint. Implements `EncoderAdapter` and `TakesVideo`."""

    def __init__(self, family: ClipGridFamily, config: Mapping[str, Any], name: str, encoder: EncoderConfig) -> None:
        """Raises ConfigError as `ClipGridAdapter` does."""
        super().__init__(family, config, name, encoder)
        self.axes = (CaptureAxis(name="modality", keys=(*IMAGE, *VIDEO)),)
        self._clips = PackedLayout(
            encoder.layouts,
            name,
            patches_per_token=family.merge**2 * family.frames_together,
            max_segments=encoder.max_segments_per_graph,
        )

    def axis_choices(self, grid: Grid) -> list[AxisKeys]:
        """A still, or a frame that is left over, goes with images if it can."""
        return [IMAGE, VIDEO] if grid[0] == 1 else [VIDEO]

    def capacity(self, axis_keys: AxisKeys, token_budget: int) -> Capacity:
        """Room for `token_budget` tokens of images or of whole groups of frames."""
        return (self._clips if axis_keys == VIDEO else self.layout).capacity(token_budget)

    def default_budgets(self, axis_keys: AxisKeys, device: str) -> tuple[int, ...]:
        """For clips up to four groups of the largest frames."""
        if axis_keys == IMAGE:
            return super().default_budgets(axis_keys, device)
        return CPU_LADDER if device == "cpu" else LADDER

    def exact(self, shapes: Sequence[SegmentShape]) -> tuple[AxisKeys, Capacity]:
        """A run of just these segments."""
        _, capacity = super().exact(shapes)
        return (VIDEO if any(shape.grid[0] > 1 for shape in shapes) else IMAGE), capacity

    def sample(self, axis_keys: AxisKeys, *, scale: int = 1) -> Segment:
        """A small square, or a group of such frames."""
        still = super().sample(axis_keys, scale=scale)
        if axis_keys == IMAGE:
            return still
        frames = self.family.frames_together
        shape = self.measure((frames, *still.shape.grid[1:]))
        return Segment(shape=shape, patches_PC=np.tile(still.patches_PC, (frames, 1)))

    def inputs(self, axis_keys: AxisKeys, capacity: Capacity) -> dict[str, TensorSpec]:
        """For clips also each patch's frame, and the patches that are averaged, with their weights."""
        specs = super().inputs(axis_keys, capacity)
        if axis_keys == IMAGE:
            return specs
        pooled = (capacity.tokens * self.family.merge**2, self.family.frames_together)
        return {
            "frames": TensorSpec(shape=(capacity.patches,), dtype="int32"),
            "pooled": TensorSpec(shape=pooled, dtype="int32"),
            "pooled_weights": TensorSpec(shape=pooled, dtype="float32"),
        } | specs

    def fill(
        self, host: Mapping[str, np.ndarray], segments: Sequence[Segment], axis_keys: AxisKeys, capacity: Capacity
    ) -> int:
        """Lay the segments end to end."""
        used = super().fill(host, segments, axis_keys, capacity)
        if axis_keys == IMAGE:
            return used
        frames, pooled, weights, start = [], [], [], 0
        for segment in segments:
            count, rows, columns = segment.shape.grid
            each = np.arange(self.family.frames_together)
            # Frame 0 of the table of times is that of stills.
            frames.append(np.repeat(np.arange(count, dtype=np.int32) + (count > 1), rows * columns))
            places = np.arange(rows * columns)[:, None] + np.where(each < count, each, 0) * rows * columns
            pooled.append((start + places).astype(np.int32))
            weights.append(np.broadcast_to(np.where(each < count, 1 / count, 0).astype(np.float32), places.shape))
            start += segment.shape.num_patches
        fill_rows(host["frames"], frames)
        fill_rows(host["pooled"], pooled)
        fill_rows(host["pooled_weights"], weights)
        return used


def choose_frames(total: int, frames_per_s: float, options: VideoConfig, settings: Mapping[str, Any]) -> list[int]:
    """Numbers of the frames, rising: so many a second, each at the start of its equal part of the clip."""
    if options.num_frames is not None:
        return spread(total, options.num_frames)
    rate = options.fps or settings.get("fps") or FRAMES_PER_S
    count = max(1, min(int(total / frames_per_s * rate), total))
    return within_bounds([index * total // count for index in range(count)], total, options)
