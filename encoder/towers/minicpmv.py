"""MiniCPM-V's tower and resampler over packed slices or dense rectangles of slices."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from encoder.adapters.base import EncoderAdapter
from encoder.adapters.layouts import Rectangle
from encoder.adapters.minicpmv_config import MiniCPMVSizes
from encoder.arena import ArenaLayout
from encoder.attention import (
    cross_attention,
    dense_cross_attention,
    dense_self_attention,
    self_attention,
)
from encoder.pictures import draw_picture
from encoder.towers.resampler import Resampler
from encoder.towers.siglip import SiglipTower
from encoder.types import AxisKeys, Capacity

CALIBRATION_SIZES = ((640, 480), (480, 800), (448, 448), (1200, 400), (300, 200), (200, 300), (1280, 720), (400, 1000))


class MiniCPMVModel:
    """Implements `EncoderModel`."""

    def __init__(
        self,
        sizes: MiniCPMVSizes,
        rectangles: Mapping[str, Rectangle | None],
        weights: Mapping[str, Tensor],
        device: torch.device,
        dtype: torch.dtype,
        backend: str,
    ) -> None:
        """`rectangles` are those of the layout axis's keys, None for the packed one."""
        self.tower = SiglipTower(sizes, weights, device, dtype)
        self.resampler = Resampler(weights, device, dtype)
        self.backend = backend
        self._rectangles, self._device = rectangles, device

    def quantise(self, adapter: EncoderAdapter) -> None:
        """Turn the GEMMs to fp8, calibrated on drawn pictures of common shapes as this adapter prepares them."""
        pictures = [draw_picture(width, height, seed) for seed, (width, height) in enumerate(CALIBRATION_SIZES)]
        segments = [segment for picture in pictures for segment in adapter.prepare(picture)]
        axis_keys, capacity = adapter.exact([segment.shape for segment in segments])
        layout = ArenaLayout.of(adapter.inputs(axis_keys, capacity))
        block = torch.zeros(layout.num_bytes, dtype=torch.uint8)
        adapter.fill(layout.arrays(block), segments, axis_keys, capacity)
        inputs = layout.views(block.to(self._device))
        tower = self.tower
        attend = self_attention(self.backend, inputs["cu_seqlens"], tower.num_heads, tower.head_width, capacity.longest)
        features_PD = tower.quantise(inputs["pixels"], inputs["position_ids"], attend)
        self.resampler.quantise(features_PD)

    def reserve(self, longest: int) -> None:
        """Grow the resampler's tables to the coordinates of such segments."""
        self.resampler.reserve(longest)

    def forward(self, inputs: Mapping[str, Tensor], axis_keys: AxisKeys, capacity: Capacity) -> Tensor:
        """Tokens `[segments * Q, E]`."""
        cu_seqlens = inputs["cu_seqlens"]
        tower, resampler = self.tower, self.resampler
        rectangle = self._rectangles.get(str(axis_keys[0]))
        if rectangle is None:
            cu_frames = inputs.get("cu_frames", cu_seqlens)
            attend = self_attention(self.backend, cu_frames, tower.num_heads, tower.head_width, capacity.longest)
            cross = partial(
                cross_attention,
                self.backend,
                cu_seqlens=cu_seqlens,
                num_heads=resampler.num_heads,
                longest=capacity.longest,
            )
        else:
            lengths = None if rectangle.exact else cu_seqlens.diff()
            attend = dense_self_attention(capacity.segments, tower.num_heads, lengths)
            cross = partial(
                dense_cross_attention,
                num_segments=capacity.segments,
                num_heads=resampler.num_heads,
                lengths=lengths,
            )
        features_PD = tower.forward(inputs["pixels"], inputs["position_ids"], attend)
        frames = (inputs["times"], inputs["frame_of_patch"]) if "times" in inputs else None
        return resampler.forward(features_PD, inputs["rows"], inputs["columns"], cross, frames)
