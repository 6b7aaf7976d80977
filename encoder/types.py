"""Torch-free values that travel between client, router and worker."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from encoder.travel import travels

Grid = tuple[int, int, int]
"""Frames, rows and columns of one segment, in patches."""

AxisKeys = tuple[Hashable, ...]
"""One key for each capture axis of an encoder, in the order of `EncoderAdapter.axes`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentShape:
    """Size of one segment: patches that attend to each other (a slice, a frame, a tile)."""

    grid: Grid
    num_patches: int
    num_tokens: int


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class ItemShape:
    """Size of one image or video, known from its header alone."""

    grids: tuple[Grid, ...]
    num_patches: int
    num_tokens: int

    @classmethod
    def of(cls, shapes: Sequence[SegmentShape]) -> ItemShape:
        """Of an item of these segments."""
        return cls(
            grids=tuple(shape.grid for shape in shapes),
            num_patches=sum(shape.num_patches for shape in shapes),
            num_tokens=sum(shape.num_tokens for shape in shapes),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphKey:
    """Names one captured graph."""

    encoder: str  # model and numbers it computes in, such as "minicpmv-2.6@bfloat16"
    path: str  # which of the encoder's paths, such as "image"
    axis_keys: AxisKeys  # such as ("packed",), ("24x43",) or ("<=32x64",)
    token_budget: int  # output rows the graph has room for

    def __str__(self) -> str:
        keys = ",".join(str(key) for key in self.axis_keys)
        return f"{self.encoder}/{self.path}[{keys}]/{self.token_budget}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What one graph, or one eager run, has room for."""

    patches: int
    segments: int
    tokens: int
    longest: int  # patches of the longest segment it may hold

    def admits(self, shape: SegmentShape) -> bool:
        """Whether a segment of this size fits when it comes alone."""
        return (
            self.segments >= 1
            and shape.num_patches <= min(self.patches, self.longest)
            and shape.num_tokens <= self.tokens
        )


class MissReason(StrEnum):
    """Why a segment ran eagerly."""

    GRAPHS_OFF = "graphs_off"  # the configuration asks for no graphs
    NO_AXIS_KEY = "no_axis_key"  # no captured axis key takes this grid
    TOO_LARGE = "too_large"  # an axis key takes the grid, but no captured budget has the room
    CAPTURE_FAILED = "capture_failed"  # the graphs that would hold it could not be captured
    SLOWER_THAN_EAGER = "slower_than_eager"  # a graph would hold it and would take longer
