"""Encoders that look at tiles: the whole image resized, or pieces of it, each a segment of its own.

All tiles of a run have the same size, so that a graph holds a number of them, dense and without a mask: the fastest
attention there is. Where a family has tiles of several sizes (a `ViewFamily`), an axis named "view" keeps them apart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from encoder.adapters.base import CaptureAxis, EncoderModel, Segment, TensorSpec
from encoder.adapters.cutting import Tile, cut_out
from encoder.adapters.stock import StockAdapter
from encoder.adapters.stock_families import TileFamily, ViewFamily
from encoder.adapters.tile_kind import TileKind
from encoder.errors import ConfigError
from encoder.types import AxisKeys, Capacity, Grid, ItemShape, SegmentShape

if TYPE_CHECKING:
    import torch

    from encoder.config import EncoderConfig
    from encoder.media import MediaHeader


class TileAdapter(StockAdapter):
    """Adapter of one checkpoint of a family of tiles. Implements `EncoderAdapter`."""

    family: TileFamily | ViewFamily

    path = "image"

    def __init__(
        self, family: TileFamily | ViewFamily, config: Mapping[str, Any], name: str, encoder: EncoderConfig
    ) -> None:
        """Raises ConfigError for layouts, which tiles have none of."""
        if encoder.layouts != ("packed",):
            raise ConfigError(f"{name}: tiles have one size and one layout; leave out layouts {list(encoder.layouts)}")
        self.encoder, self.family = name, family
        self.hidden_size = family.hidden_size
        self._config = dict(config)
        if isinstance(family, ViewFamily):
            axis, kinds = "view", family.views
        else:
            kind = TileKind(size=family.tile_size, grid=family.grid, num_tokens=family.num_tokens)
            axis, kinds = "tile", {"x".join(map(str, kind.size)): kind}
        self.kinds = {key: replace(kind, max_segments=encoder.max_segments_per_graph) for key, kind in kinds.items()}
        self._key_of = {kind.grid: key for key, kind in self.kinds.items()}
        self.axes: tuple[CaptureAxis, ...] = (CaptureAxis(name=axis, keys=tuple(self.kinds)),)

    def probe(self, header: MediaHeader) -> ItemShape:
        """The patches and tokens of its tiles."""
        return ItemShape.of([self._kind_of(tile).shape for tile in self.family.cut(header.width, header.height)])

    def _kind_of(self, tile: Tile) -> TileKind:
        return next(kind for kind in self.kinds.values() if tile.size in (None, kind.size))

    def measure(self, grid: Grid) -> SegmentShape:
        """The tile that has this grid; no graph holds another."""
        if grid in self._key_of:
            return self.kinds[self._key_of[grid]].shape
        return SegmentShape(grid=grid, num_patches=math.prod(grid), num_tokens=1)

    def prepare(self, image: Image.Image) -> list[Segment]:
        """Tiles of an RGB image; those of one resized picture share it."""
        tiles = self.family.cut(*image.size)
        kinds = [self._kind_of(tile) for tile in tiles]
        sized = [replace(tile, size=kind.size) for tile, kind in zip(tiles, kinds, strict=True)]
        pictures = cut_out(image, sized, self.family.pixels.resample)
        return [kind.segment(picture) for kind, picture in zip(kinds, pictures, strict=True)]

    def axis_choices(self, grid: Grid) -> list[AxisKeys]:
        """The key of this grid's tiles."""
        return [(self._key_of[grid],)] if grid in self._key_of else []

    def _kind(self, axis_keys: AxisKeys) -> TileKind:
        return self.kinds[str(axis_keys[0])]

    def capacity(self, axis_keys: AxisKeys, token_budget: int) -> Capacity:
        """Room for whole tiles."""
        return self._kind(axis_keys).capacity(token_budget)

    def default_budgets(self, axis_keys: AxisKeys, device: str) -> tuple[int, ...]:
        """Numbers of tiles that an image gives, then larger steps."""
        return self._kind(axis_keys).default_budgets(device)

    def exact(self, shapes: Sequence[SegmentShape]) -> tuple[AxisKeys, Capacity]:
        """So many tiles of one kind."""
        (axis_keys,) = {(self._key_of[shape.grid],) for shape in shapes}
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
        from encoder.towers.stock import TileModel

        sizes = {key: kind.size for key, kind in self.kinds.items()}
        return TileModel(self.family, sizes, weights, device, dtype)
