"""The adapter protocol: everything encpool asks of a model family.

An adapter is free of torch until `build` is called, so that clients and the router use the same arithmetic as the
worker. It implements these shapes; it inherits nothing.
"""

# Shapes: P patches of a batch, C numbers of a patch, T output tokens, E width of an output token.

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from encoder.types import AxisKeys, Capacity, Grid, ItemShape, SegmentShape

if TYPE_CHECKING:
    import numpy as np
    import torch
    from PIL import Image

    from encoder.config import Precision
    from encoder.media import MediaHeader
    from encoder.video import Video


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One schedulable piece of an item, prepared on the CPU."""

    shape: SegmentShape
    patches_PC: np.ndarray  # uint8, as the media has them; normalised on the GPU. A tile may be one row
    times: tuple[int, ...] = ()  # of each frame, in the steps that the model counts; none: no times


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureAxis:
    """A dimension along which graphs differ, and the keys that are captured along it."""

    name: str
    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """An input of a graph. Dimension 0 of the field named `pixels` counts patches, or tiles."""

    shape: tuple[int, ...]
    dtype: str  # a numpy name: "uint8", "int32"


class EncoderAdapter(Protocol):
    """A model family's arithmetic and preparation."""

    encoder: str
    """Name of the model in graph keys, such as "minicpmv-2.6"."""

    path: str
    """The path that its graphs belong to, such as "image"."""

    hidden_size: int
    """Width of an output token."""

    axes: tuple[CaptureAxis, ...]
    """Capture axes; a graph exists for each combination of their keys and each token budget."""

    def probe(self, header: MediaHeader) -> ItemShape:
        """Sizes of the item, from its header alone. Pure arithmetic."""

    def measure(self, grid: Grid) -> SegmentShape:
        """Patches and tokens of a segment of this grid."""

    def prepare(self, image: Image.Image) -> list[Segment]:
        """Resize and cut an RGB image into segments whose shapes are exactly what `probe` said. CPU only."""

    def axis_choices(self, grid: Grid) -> list[AxisKeys]:
        """Axis keys whose graphs may hold a segment of this grid, the tightest first; empty when none does."""

    def capacity(self, axis_keys: AxisKeys, token_budget: int) -> Capacity:
        """Room of a graph. Raises ConfigError when the budget holds no segment."""

    def default_budgets(self, axis_keys: AxisKeys, device: str) -> tuple[int, ...]:
        """Token budgets worth capturing when the configuration names none."""

    def exact(self, shapes: Sequence[SegmentShape]) -> tuple[AxisKeys, Capacity]:
        """Layout and room of an eager run of just these segments."""

    def sample(self, axis_keys: AxisKeys) -> Segment:
        """A segment as traffic brings them, of any pixels, for a graph of these keys to be measured with."""

    def inputs(self, axis_keys: AxisKeys, capacity: Capacity) -> dict[str, TensorSpec]:
        """Input buffers of a run; `pixels` comes last."""

    def fill(
        self,
        host: Mapping[str, np.ndarray],
        segments: Sequence[Segment],
        axis_keys: AxisKeys,
        capacity: Capacity,
    ) -> int:
        """Write the segments into host buffers shaped as `inputs` says; return the rows of `pixels` in use.

        The buffers hold leftovers of other runs: every number of every field is written, but for unused pixels.
        """

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the tensors it reads, as the released checkpoints name them."""

    def checkpoint_config(self) -> dict[str, Any]:
        """The `config.json` that a released-layout checkpoint of this model carries."""

    def build(
        self,
        weights: Mapping[str, torch.Tensor],
        device: torch.device,
        dtype: torch.dtype,
        attention: str,
        precision: Precision,
    ) -> EncoderModel:
        """Put the weights on the device. Imports torch."""


@runtime_checkable
class TakesVideo(Protocol):
    """What an adapter has besides, when its model takes video."""

    def probe_video(self, header: MediaHeader) -> ItemShape:
        """Sizes of a clip, from its header alone. Pure arithmetic."""

    def prepare_video(self, video: Video) -> Iterator[Segment]:
        """Segments of a clip whose shapes are exactly what `probe_video` said, one after another as frames are decoded.

        CPU only. Holds no more than the frames of one segment.
        """


def modalities_of(adapter: EncoderAdapter) -> tuple[str, ...]:
    """What its model takes: images, or images and videos."""
    return ("image", "video") if isinstance(adapter, TakesVideo) else ("image",)


class EncoderModel(Protocol):
    """The part of a family that computes."""

    def reserve(self, longest: int) -> None:
        """Make room for segments of up to this many patches. May allocate, so it comes before a capture."""

    def forward(self, inputs: Mapping[str, torch.Tensor], axis_keys: AxisKeys, capacity: Capacity) -> torch.Tensor:
        """Tokens `[capacity.tokens, E]`, those of the first segment first, in the order `fill` got them.

        Safe to capture: no host sync and no shape that depends on values. Rows beyond the segments are undefined.
        """
