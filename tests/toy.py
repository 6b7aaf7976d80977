"""A toy encoder with two capture axes: the segment's row width, and the parity of its row count.

A token is the sum of a row of patches times 1 (odd) or 2 (even): cheap to check, and the graph of the wrong key gives
a wrong number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image

from encoder.adapters.base import CaptureAxis, Segment, TensorSpec
from encoder.config import Precision
from encoder.errors import ConfigError
from encoder.media import MediaHeader
from encoder.types import AxisKeys, Capacity, Grid, ItemShape, SegmentShape


class ToyAdapter:
    """Implements `EncoderAdapter`: one row of patches gives one token."""

    encoder, path, hidden_size = "toy", "image", 1

    def __init__(self, widths: Sequence[str] = ("4", "8"), parities: Sequence[str] = ("odd", "even")) -> None:
        self.axes: tuple[CaptureAxis, ...] = (
            CaptureAxis(name="width", keys=tuple(widths)),
            CaptureAxis(name="parity", keys=tuple(parities)),
        )

    def probe(self, header: MediaHeader) -> ItemShape:
        raise NotImplementedError

    def prepare(self, image: Image.Image) -> list[Segment]:
        raise NotImplementedError

    def measure(self, grid: Grid) -> SegmentShape:
        return SegmentShape(grid=grid, num_patches=grid[1] * grid[2], num_tokens=grid[1])

    def axis_choices(self, grid: Grid) -> list[AxisKeys]:
        parity = "even" if grid[1] % 2 == 0 else "odd"
        widths = sorted(int(key) for key in self.axes[0].keys if int(key) >= grid[2])
        return [(str(width), parity) for width in widths if parity in self.axes[1].keys]

    def capacity(self, axis_keys: AxisKeys, token_budget: int) -> Capacity:
        if token_budget < 2:
            raise ConfigError("a toy segment needs room for two rows")
        patches = token_budget * int(str(axis_keys[0]))
        return Capacity(patches=patches, segments=token_budget, tokens=token_budget, longest=patches)

    def default_budgets(self, axis_keys: AxisKeys, device: str) -> tuple[int, ...]:
        return 4, 8

    def exact(self, shapes: Sequence[SegmentShape]) -> tuple[AxisKeys, Capacity]:
        width = max(shape.grid[2] for shape in shapes)
        rows = sum(shape.num_tokens for shape in shapes)
        capacity = Capacity(patches=rows * width, segments=len(shapes), tokens=rows, longest=rows * width)
        return (str(width), "mixed"), capacity

    def sample(self, axis_keys: AxisKeys) -> Segment:
        return toy_segment(self, 1 if axis_keys[1] == "odd" else 2, int(str(axis_keys[0])))

    def inputs(self, axis_keys: AxisKeys, capacity: Capacity) -> dict[str, TensorSpec]:
        return {
            "scale": TensorSpec(shape=(capacity.tokens,), dtype="int32"),
            "pixels": TensorSpec(shape=(capacity.tokens, int(str(axis_keys[0]))), dtype="uint8"),
        }

    def fill(
        self,
        host: Mapping[str, np.ndarray],
        segments: Sequence[Segment],
        axis_keys: AxisKeys,
        capacity: Capacity,
    ) -> int:
        host["scale"][:] = 0
        row = 0
        for segment in segments:
            _, rows, columns = segment.shape.grid
            host["pixels"][row : row + rows] = 0
            host["pixels"][row : row + rows, :columns] = segment.patches_PC
            host["scale"][row : row + rows] = 2 - rows % 2
            row += rows
        return row

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        return {}

    def checkpoint_config(self) -> dict[str, Any]:
        return {}

    def build(
        self,
        weights: Mapping[str, torch.Tensor],
        device: torch.device,
        dtype: torch.dtype,
        attention: str,
        precision: Precision,
    ) -> ToyModel:
        return ToyModel()


class ToyModel:
    """Implements `EncoderModel`; fails for budgets it was told not to capture."""

    def __init__(self, failing_budgets: Sequence[int] = ()) -> None:
        self.failing_budgets = failing_budgets

    def reserve(self, longest: int) -> None:
        pass

    def forward(self, inputs: Mapping[str, torch.Tensor], axis_keys: AxisKeys, capacity: Capacity) -> torch.Tensor:
        if capacity.tokens in self.failing_budgets and axis_keys[1] != "mixed":
            raise RuntimeError("cannot capture this")
        return (inputs["pixels"].float().sum(1) * inputs["scale"])[:, None]


def toy_segment(adapter: ToyAdapter, rows: int, columns: int, seed: int = 0) -> Segment:
    patches = np.random.default_rng(seed).integers(0, 256, (rows, columns), dtype=np.uint8)
    return Segment(shape=adapter.measure((1, rows, columns)), patches_PC=patches)


def toy_tokens(segment: Segment) -> torch.Tensor:
    """What the encoder must give for it."""
    sums = torch.from_numpy(segment.patches_PC).float().sum(1)
    return (sums * (2 - len(sums) % 2))[:, None]
