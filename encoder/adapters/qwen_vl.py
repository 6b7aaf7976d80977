"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL (and its MoE twin, whose tower is the same): images of any grid, and video.

A segment is an image, or the two frames of a video that share their patches: attention never leaves it. Segments lie
packed, whatever their grids. Qwen3-VL's deepstack features ride along: an output row is the merged features, then
those of each level, so it is (1 + levels) x the language model's width, as vLLM hands them on.
"""

# Shapes: P patches of a run, T tokens, C numbers of a patch, E width of an output row.

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from encoder.adapters.base import CaptureAxis, EncoderModel, Segment, TensorSpec
from encoder.adapters.cutting import Tile, cut_out, patch_rows
from encoder.adapters.frame_indices import frame_indices
from encoder.adapters.packed import PackedLayout
from encoder.adapters.processors import note_clip_pixels
from encoder.adapters.qwen_vl_config import read_sizes
from encoder.adapters.qwen_vl_inputs import fill_inputs, input_specs
from encoder.adapters.qwen_vl_video import frame_size, sampled_frames
from encoder.adapters.qwen_vl_weights import qwen_weight_shapes
from encoder.adapters.smart_resize import smart_resize
from encoder.types import AxisKeys, Capacity, Grid, ItemShape, SegmentShape

if TYPE_CHECKING:
    import torch

    from encoder.config import EncoderConfig, Precision
    from encoder.media import MediaHeader
    from encoder.video import Video

SAMPLE_SIDE = 16  # patches


class QwenVL:
    """Adapter of one checkpoint. Implements `EncoderAdapter` and `TakesVideo`."""

    path = "image"

    def __init__(self, config: Mapping[str, Any], *, name: str, encoder: EncoderConfig) -> None:
        """Read a released `config.json`. Raises ConfigError for sizes or layouts that cannot work."""
        self.encoder = name
        self.sizes = sizes = read_sizes(config, name, encoder.resize_pixels)
        self.hidden_size = sizes.output_width
        self.layout = PackedLayout(
            encoder.layouts,
            name,
            patches_per_token=sizes.patches_per_token,
            max_segments=encoder.max_segments_per_graph,
        )
        self.axes: tuple[CaptureAxis, ...] = self.layout.axes
        self._video, self._config = encoder.video, dict(config)
        note_clip_pixels(config, sizes.pixels, name)

    # Sizes

    def measure(self, grid: Grid) -> SegmentShape:
        """One token for each `merge_size` x `merge_size` patches."""
        frames, rows, columns = grid
        patches = frames * rows * columns
        return SegmentShape(grid=grid, num_patches=patches, num_tokens=patches // self.sizes.patches_per_token)

    def probe(self, header: MediaHeader) -> ItemShape:
        """An image is one segment. Raises BadMediaError for a side over 200 times the other."""
        return self._shape(self._image_size(header.width, header.height), 1)

    def probe_video(self, header: MediaHeader) -> ItemShape:
        """One segment for each pair of sampled frames."""
        num_frames = len(sampled_frames(header, self.sizes, self._video))
        num_segments = -(-num_frames // self.sizes.temporal_patch_size)
        return self._shape(frame_size(header, num_frames, self.sizes), num_segments)

    def _image_size(self, width: int, height: int) -> tuple[int, int]:
        pixels = self.sizes.image_pixels
        return smart_resize(width, height, factor=self.sizes.token_side, least=pixels.least, most=pixels.most)

    def _shape(self, size: tuple[int, int], num_segments: int) -> ItemShape:
        one = self.measure((1, size[1] // self.sizes.patch_size, size[0] // self.sizes.patch_size))
        return ItemShape.of([one] * num_segments)

    # Preparation, on the CPU

    def prepare(self, image: Image.Image) -> list[Segment]:
        """The resized image in patches. It stands for both frames of its patches, and is stored once."""
        return [self._segment(self._resized(image, self._image_size(*image.size)))]

    def prepare_video(self, video: Video) -> Iterator[Segment]:
        """Segments one after another, as frames are decoded; the last frame is repeated to fill its segment."""
        numbers = sampled_frames(video.header, self.sizes, self._video)
        size = frame_size(video.header, len(numbers), self.sizes)
        pictures: list[np.ndarray] = []
        for frame in video.frames(numbers):
            pictures += self._resized(frame, size)
            if len(pictures) == self.sizes.temporal_patch_size:
                yield self._segment(pictures)
                pictures = []
        if pictures:
            yield self._segment(pictures + pictures[-1:] * (self.sizes.temporal_patch_size - len(pictures)))

    def _resized(self, image: Image.Image, size: tuple[int, int]) -> list[np.ndarray]:
        """The one picture `[height, width, 3]`."""
        return cut_out(image, [Tile(resized=(size,))], self.sizes.pixels.resample)

    def _segment(self, pictures: Sequence[np.ndarray]) -> Segment:
        """Cut `[height, width, 3]` into patch rows in the order of the run, each (frame, y, x, channel)."""
        side, merge = self.sizes.patch_size, self.sizes.merge_size
        rows, columns = pictures[0].shape[0] // side, pictures[0].shape[1] // side
        shape = self.measure((1, rows, columns))
        run_order = frame_indices(rows, columns, merge, self.sizes.window_tokens).run_order_T
        patches_PC = np.empty((shape.num_patches, len(pictures) * self.sizes.frame_bytes), np.uint8)
        frames = np.split(patches_PC.reshape(len(run_order), merge**2, -1), len(pictures), axis=2)
        for picture, frame in zip(pictures, frames, strict=True):
            frame[:] = patch_rows(picture, side, merge)[run_order]
        return Segment(shape=shape, patches_PC=patches_PC)

    # Graphs

    def axis_choices(self, grid: Grid) -> list[AxisKeys]:
        """Packed, whatever the grid."""
        return list(self.layout.choices)

    def capacity(self, axis_keys: AxisKeys, token_budget: int) -> Capacity:
        """Room for `token_budget` tokens of any grids."""
        return self.layout.capacity(token_budget)

    def default_budgets(self, axis_keys: AxisKeys, device: str) -> tuple[int, ...]:
        """Up to the largest image as released; fewer on a CPU."""
        return self.layout.default_budgets(device)

    def exact(self, shapes: Sequence[SegmentShape]) -> tuple[AxisKeys, Capacity]:
        """A run of just these segments."""
        return self.layout.exact(shapes)

    def sample(self, axis_keys: AxisKeys) -> Segment:
        """A small square: every budget holds some."""
        rng = np.random.default_rng(0)
        side = SAMPLE_SIDE * self.sizes.patch_size
        return self._segment([rng.integers(0, 256, (side, side, 3), dtype=np.uint8)])

    def inputs(self, axis_keys: AxisKeys, capacity: Capacity) -> dict[str, TensorSpec]:
        """As `input_specs` says."""
        return input_specs(self.sizes, capacity)

    def fill(
        self, host: Mapping[str, np.ndarray], segments: Sequence[Segment], axis_keys: AxisKeys, capacity: Capacity
    ) -> int:
        """Lay the segments end to end."""
        return fill_inputs(host, segments, self.sizes)

    # Weights and model

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Released names (`visual.*`, from Qwen3-VL on `model.visual.*`) and their shapes."""
        return qwen_weight_shapes(self.sizes)

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
        """The tower on the device, in the native precision."""
        from encoder.towers.qwen_vl import QwenVLModel

        return QwenVLModel(self.sizes, weights, device, dtype, attention)
