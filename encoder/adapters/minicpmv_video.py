"""MiniCPM-V that takes clips: 2.6 and 4.0 frame by frame, 4.5 in groups of frames with their times.

A frame is its overview alone, without slices. For 2.6 and 4.0 it is a segment like a still. For 4.5 a group of frames
is one segment and gives one block of Q tokens: the tower's attention keeps to each frame, the resampler's reads the
whole group, whose keys carry each frame's time on top of its places. In the packed layout that is two lists of
offsets, of frames and of groups. Groups of several frames run in graphs of their own (the layout key "grouped"), for
they need several times the patches for the same tokens.
"""

# Shapes: P patches of a run, S segments, F frames, C numbers of a patch (588).

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from encoder.adapters.base import CaptureAxis, Segment, TensorSpec
from encoder.adapters.layouts import packed_rows
from encoder.adapters.minicpmv import MiniCPMV
from encoder.adapters.minicpmv_frames import MAX_GROUP, USUAL_GROUP, FrameGroups, choose_frames, choose_groups
from encoder.adapters.packed import fill_offsets
from encoder.pixels import pixels_of
from encoder.types import AxisKeys, Capacity, Grid, ItemShape, SegmentShape

if TYPE_CHECKING:
    from encoder.config import EncoderConfig
    from encoder.media import MediaHeader
    from encoder.video import Video

GROUPED = "grouped"
GROUPED_LADDER = (1, 2, 4, 8)
CPU_GROUPED_LADDER = (1, 2)
NO_TIME = -1


class MiniCPMVideo(MiniCPMV):
    """Adapter of one MiniCPM-V 2.6, 4.0 or 4.5 checkpoint. Implements `EncoderAdapter` and `TakesVideo`."""

    def __init__(self, config: Mapping[str, Any], *, name: str, encoder: EncoderConfig) -> None:
        """Raises ConfigError as `MiniCPMV` does."""
        super().__init__(config, name=name, encoder=encoder)
        self._video = encoder.video
        self.timed = self.sizes.version == "4.5"
        if self.timed:
            self.axes = (CaptureAxis(name="layout", keys=(*self.layouts.keys, GROUPED)),)

    # Clips

    def _groups(self, header: MediaHeader) -> FrameGroups:
        choose = choose_groups if self.timed else choose_frames
        return choose(header.num_frames, header.frames_per_s, self._video)

    def _frame_size(self, header: MediaHeader) -> tuple[int, int]:
        return self.plan(header.width, header.height, 1).overview

    def probe_video(self, header: MediaHeader) -> ItemShape:
        """One segment a frame, or a group of frames."""
        width, height = self._frame_size(header)
        side = self.sizes.patch_size
        shapes = [self.measure((len(times), height // side, width // side)) for times in self._groups(header).times]
        return ItemShape.of(shapes)

    def prepare_video(self, video: Video) -> Iterator[Segment]:
        """Segments one after another, as frames are decoded."""
        size, groups = self._frame_size(video.header), self._groups(video.header)
        frames = video.frames(groups.numbers)
        for times in groups.times:
            group = [pixels_of(next(frames).resize(size, Image.Resampling.BICUBIC)) for _ in times]
            yield self._segment(group, times if self.timed else ())

    # Graphs

    def axis_choices(self, grid: Grid) -> list[AxisKeys]:
        """Groups of several frames go to graphs of their own."""
        return [(GROUPED,)] if grid[0] > 1 else super().axis_choices(grid)

    def capacity(self, axis_keys: AxisKeys, token_budget: int) -> Capacity:
        """Room for `token_budget // Q` slices of this layout, or for as many groups."""
        if axis_keys != (GROUPED,):
            return super().capacity(axis_keys, token_budget)
        groups = self.layouts.segments(token_budget)
        nominal = self.sizes.nominal_patches
        return Capacity(
            patches=packed_rows(groups * self._group_frames, nominal),
            segments=groups,
            tokens=groups * self.sizes.queries,
            longest=MAX_GROUP * nominal * 5 // 4,
        )

    @property
    def _group_frames(self) -> int:
        """Of the groups that long clips are made of."""
        return self._video.max_group_frames or USUAL_GROUP

    def default_budgets(self, axis_keys: AxisKeys, device: str) -> tuple[int, ...]:
        """Powers of two of groups; else as for stills."""
        if axis_keys != (GROUPED,):
            return super().default_budgets(axis_keys, device)
        return self.layouts.budgets(CPU_GROUPED_LADDER if device == "cpu" else GROUPED_LADDER)

    def exact(self, shapes: Sequence[SegmentShape]) -> tuple[AxisKeys, Capacity]:
        """A packed run of just these slices and groups."""
        axis_keys, capacity = super().exact(shapes)
        return ((GROUPED,) if any(shape.grid[0] > 1 for shape in shapes) else axis_keys), capacity

    def sample(self, axis_keys: AxisKeys) -> Segment:
        """A square slice, or a group of square frames."""
        if axis_keys != (GROUPED,):
            return super().sample(axis_keys)
        side, frames = self.sizes.scale_resolution // self.sizes.patch_size, self._group_frames
        shape = self.measure((frames, side, side))
        pixels = np.random.default_rng(0).integers(0, 256, (shape.num_patches, self.sizes.patch_bytes), dtype=np.uint8)
        return Segment(shape=shape, patches_PC=pixels, times=tuple(range(frames)))

    def inputs(self, axis_keys: AxisKeys, capacity: Capacity) -> dict[str, TensorSpec]:
        """As for stills; with times also the frames' offsets, their times, and the frame of each patch."""
        specs = super().inputs(axis_keys, capacity)
        if not self.timed:
            return specs
        frames = capacity.segments * (MAX_GROUP if axis_keys == (GROUPED,) else 1)
        return {
            "cu_frames": TensorSpec(shape=(frames + 1,), dtype="int32"),
            "times": TensorSpec(shape=(frames,), dtype="int32"),
            "frame_of_patch": TensorSpec(shape=(capacity.patches,), dtype="int32"),
        } | specs

    def fill(
        self, host: Mapping[str, np.ndarray], segments: Sequence[Segment], axis_keys: AxisKeys, capacity: Capacity
    ) -> int:
        """As for stills; with times also what `inputs` has besides."""
        used = super().fill(host, segments, axis_keys, capacity)
        if not self.timed:
            return used
        times: list[int] = []
        lengths: list[int] = []
        host["frame_of_patch"][:] = 0
        places = self.layouts.rows(axis_keys, [segment.shape.num_patches for segment in segments])
        for segment, place in zip(segments, places, strict=True):
            frames, rows, columns = segment.shape.grid
            frame_of_patch = np.repeat(np.arange(frames, dtype=np.int32), rows * columns)
            host["frame_of_patch"][place] = frame_of_patch + len(times)
            times += segment.times or (NO_TIME,) * frames
            lengths += [rows * columns] * frames
        fill_offsets(host["cu_frames"], np.cumsum(lengths))
        host["times"][: len(times)] = times
        host["times"][len(times) :] = NO_TIME
        return used
