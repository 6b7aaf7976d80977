"""Tiles of one size: rows of bytes, one a tile, and graphs that hold a number of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from encoder.adapters.base import Segment, TensorSpec
from encoder.errors import ConfigError
from encoder.helpers import copy_all
from encoder.types import Capacity, Grid, SegmentShape

Size = tuple[int, int]
"""Width and height in pixels."""

LADDER = (*range(1, 14), 16, 17, 20, 24, 32, 48, 64)
"""Tiles: every number that images often give (13 of InternVL, 17 of Idefics3 and Llama 4), then larger steps."""

CPU_LADDER = (1, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class TileKind:
    """All that a tile's size determines."""

    size: Size
    grid: Grid
    num_tokens: int
    max_segments: int | None = None  # of a graph, where it is configured
    most: int = max(LADDER)  # tiles that are worth a graph

    @property
    def shape(self) -> SegmentShape:
        """Of a segment, which is one tile."""
        frames, rows, columns = self.grid
        return SegmentShape(grid=self.grid, num_patches=frames * rows * columns, num_tokens=self.num_tokens)

    def segment(self, picture: np.ndarray) -> Segment:
        """A tile's pixels `[height, width, 3]`."""
        return Segment(shape=self.shape, patches_PC=np.ascontiguousarray(picture).reshape(1, -1))

    def sample(self) -> Segment:
        """A tile of noise."""
        width, height = self.size
        return self.segment(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))

    def room(self, num_tiles: int) -> Capacity:
        """For so many tiles."""
        shape = self.shape
        return Capacity(
            patches=num_tiles * shape.num_patches,
            segments=num_tiles,
            tokens=num_tiles * shape.num_tokens,
            longest=shape.num_patches,
        )

    def capacity(self, token_budget: int) -> Capacity:
        """Room for whole tiles. Raises ConfigError where it is not enough for one."""
        num_tiles = min(token_budget // self.num_tokens, self.max_segments or token_budget)
        if num_tiles < 1:
            raise ConfigError(
                f"token budget {token_budget} holds no tile of {self.num_tokens} tokens; "
                f"use multiples of {self.num_tokens}"
            )
        return self.room(num_tiles)

    def default_budgets(self, device: str) -> tuple[int, ...]:
        """Numbers of tiles that an image gives, then larger steps."""
        most = min(self.most, self.max_segments or self.most)
        counts = [count for count in (CPU_LADDER if device == "cpu" else LADDER) if count <= most]
        return tuple(count * self.num_tokens for count in counts)

    def inputs(self, capacity: Capacity) -> dict[str, TensorSpec]:
        """A row of bytes for each tile, in the order (y, x, channel)."""
        width, height = self.size
        return {"pixels": TensorSpec(shape=(capacity.segments, height * width * 3), dtype="uint8")}

    def fill(self, host: Mapping[str, np.ndarray], segments: Sequence[Segment]) -> int:
        """One tile after the other."""
        copy_all([(host["pixels"][row], segment.patches_PC[0]) for row, segment in enumerate(segments)])
        return len(segments)
