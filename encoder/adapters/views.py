"""Encoders of several paths: an image as tiles of several sizes, each size with tokens of its own.

An axis named "view" keeps them apart: a graph holds tiles of one view, and so does an eager run. `ViewAdapter` does
what such families share; a family says the rest in a `ViewFamily`.
"""

# Shapes: N tiles of a view, H and W pixels of one, T tokens of one, E width of a token.

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from PIL import Image

from encoder.adapters.base import CaptureAxis, EncoderModel, Segment, TensorSpec
from encoder.adapters.stock import StockAdapter
from encoder.adapters.tile_kind import TileKind
from encoder.adapters.tiles import Pixels, Tile, cut_out, refuse_layouts
from encoder.types import AxisKeys, Capacity, Grid, ItemShape, SegmentShape

if TYPE_CHECKING:
    import torch

    from encoder.config import EncoderConfig
    from encoder.media import MediaHeader


class ViewFamily(Protocol):
    """What a family says of itself."""

    hidden_size: int
    pixels: Pixels

    @property
    def views(self) -> Mapping[str, TileKind]:
        """The kinds of tiles, no two of one grid."""

    @property
    def renames(self) -> Sequence[tuple[str, str]]:
        """See `encoder.towers.stock.StockFamily`."""

    def cut(self, width: int, height: int) -> list[tuple[str, Tile]]:
        """The tiles of an image of this size, each with its view, in the order of its tokens."""

    def modules(self) -> Mapping[str, torch.nn.Module]:
        """transformers' modules, by the prefix of their tensors' names. Imports torch."""

    def bind(self, modules: Mapping[str, Any]) -> Mapping[str, Callable[[torch.Tensor], torch.Tensor]]:
        """The forward of each view, from pixels `[N, 3, H, W]` to tokens `[N, T, E]`; safe to capture."""


class ViewAdapter(StockAdapter):
    """Adapter of one checkpoint of a family of views. Implements `EncoderAdapter`."""

    family: ViewFamily

    path = "image"

    def __init__(self, family: ViewFamily, config: Mapping[str, Any], name: str, encoder: EncoderConfig) -> None:
        """Raises ConfigError for options that only packed encoders have."""
        refuse_layouts(name, encoder)
        self.encoder, self.family = name, family
        self.hidden_size = family.hidden_size
        self._config = dict(config)
        self._view_of = {kind.grid: view for view, kind in family.views.items()}
        self.axes: tuple[CaptureAxis, ...] = (CaptureAxis(name="view", keys=tuple(family.views)),)

    def probe(self, header: MediaHeader) -> ItemShape:
        """The tiles of each view."""
        return ItemShape.of([self.family.views[view].shape for view, _ in self.family.cut(header.width, header.height)])

    def measure(self, grid: Grid) -> SegmentShape:
        """A tile of the view that has this grid; no graph holds another."""
        if grid in self._view_of:
            return self.family.views[self._view_of[grid]].shape
        return SegmentShape(grid=grid, num_patches=math.prod(grid), num_tokens=1)

    def prepare(self, image: Image.Image) -> list[Segment]:
        """Tiles of an RGB image; those of one resized picture share it."""
        views, tiles = zip(*self.family.cut(*image.size), strict=True)
        pictures = cut_out(image, tiles, self.family.pixels.resample)
        return [self.family.views[view].segment(picture) for view, picture in zip(views, pictures, strict=True)]

    def axis_choices(self, grid: Grid) -> list[AxisKeys]:
        """The view of this grid."""
        return [(self._view_of[grid],)] if grid in self._view_of else []

    def _kind(self, axis_keys: AxisKeys) -> TileKind:
        return self.family.views[str(axis_keys[0])]

    def capacity(self, axis_keys: AxisKeys, token_budget: int) -> Capacity:
        """Room for whole tiles."""
        return self._kind(axis_keys).capacity(token_budget)

    def default_budgets(self, axis_keys: AxisKeys, device: str) -> tuple[int, ...]:
        """Numbers of tiles that an image gives, then larger steps."""
        return self._kind(axis_keys).default_budgets(device)

    def exact(self, shapes: Sequence[SegmentShape]) -> tuple[AxisKeys, Capacity]:
        """So many tiles of one view."""
        (axis_keys,) = {(self._view_of[shape.grid],) for shape in shapes}
        return axis_keys, self._kind(axis_keys).room(len(shapes))

    def sample(self, axis_keys: AxisKeys) -> Segment:
        """A tile of noise."""
        return self._kind(axis_keys).sample()

    def inputs(self, axis_keys: AxisKeys, capacity: Capacity) -> dict[str, TensorSpec]:
        """A row of bytes for each tile, in the order (y, x, channel)."""
        return self._kind(axis_keys).inputs(capacity)

    def fill(
        self, host: Mapping[str, np.ndarray], segments: Sequence[Segment], axis_keys: AxisKeys, capacity: Capacity
    ) -> int:
        """One tile after the other."""
        return self._kind(axis_keys).fill(host, segments)

    def _model(
        self, weights: Mapping[str, torch.Tensor], device: torch.device, dtype: torch.dtype, attention: str
    ) -> EncoderModel:
        from encoder.towers.stock import ViewModel

        return ViewModel(self.family, weights, device, dtype)
