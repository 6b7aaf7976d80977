"""Encoders that look at tiles of one size: the whole image resized, or pieces of it, each a segment of its own.

All tiles have the same grid, so that a graph holds a number of them, dense and without a mask: the fastest attention
there is. `TileAdapter` does everything that such families share; a family says the rest in a `TileFamily`.
"""

# Shapes: N tiles, H and W pixels of a tile, T tokens of a tile, E width of a token.

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from PIL import Image

from encoder.adapters.base import CaptureAxis, EncoderModel, Segment, TensorSpec
from encoder.adapters.stock import StockAdapter
from encoder.adapters.tile_kind import Size, TileKind
from encoder.errors import ConfigError
from encoder.types import AxisKeys, Capacity, Grid, ItemShape, SegmentShape

if TYPE_CHECKING:
    import torch

    from encoder.config import EncoderConfig
    from encoder.media import MediaHeader

Box = tuple[int, int, int, int]
"""Left, top, right and bottom, as Pillow has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """A piece of an image: the image or a box of it, resized to these sizes one after the other, and cut from that."""

    resized: tuple[Size, ...]
    corner: tuple[int, int] = (0, 0)  # x and y where the tile begins in what was resized; below 0: before it
    background: tuple[int, ...] = (0, 0, 0)  # where the tile lies beyond what was resized
    box: Box | None = None  # of the image as it came
    size: Size | None = None  # None: the family's tiles' size, or all that was resized


def size_of(tile: Tile) -> Size:
    """Its own size, or that of all that was resized."""
    return tile.size or tile.resized[-1]


def grid_of_tiles(resized: tuple[Size, ...], tile_size: Size) -> list[Tile]:
    """Tiles that cover what an image was resized to, row by row."""
    (width, height), (tile_width, tile_height) = resized[-1], tile_size
    return [
        Tile(resized=resized, corner=(x, y), size=tile_size)
        for y in range(0, height, tile_height)
        for x in range(0, width, tile_width)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pixels:
    """How a family makes numbers of pictures."""

    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    resample: Image.Resampling = Image.Resampling.BICUBIC


class TileFamily(Protocol):
    """What a family says of itself."""

    tile_size: Size
    grid: Grid  # of a tile
    num_tokens: int  # of a tile
    hidden_size: int
    pixels: Pixels

    @property
    def renames(self) -> Sequence[tuple[str, str]]:
        """See `encoder.towers.stock.StockFamily`."""

    def cut(self, width: int, height: int) -> list[Tile]:
        """The tiles of an image of this size, in the order of its tokens."""

    def modules(self) -> Mapping[str, torch.nn.Module]:
        """transformers' modules, by the prefix of their tensors' names. Imports torch."""

    def bind(self, modules: Mapping[str, Any]) -> Callable[[torch.Tensor], torch.Tensor]:
        """The forward over loaded modules: from pixels `[N, 3, H, W]` to tokens `[N, T, E]`; safe to capture."""


class TileAdapter(StockAdapter):
    """Adapter of one checkpoint of a tile family. Implements `EncoderAdapter`."""

    family: TileFamily

    path = "image"

    def __init__(self, family: TileFamily, config: Mapping[str, Any], name: str, encoder: EncoderConfig) -> None:
        """Raises ConfigError for options that only packed encoders have."""
        refuse_layouts(name, encoder)
        self.encoder, self.family = name, family
        self.hidden_size = family.hidden_size
        self._config = dict(config)
        self.tile = TileKind(
            size=family.tile_size,
            grid=family.grid,
            num_tokens=family.num_tokens,
            max_segments=encoder.max_segments_per_graph,
        )
        self._keys: AxisKeys = ("x".join(map(str, family.tile_size)),)
        self.axes: tuple[CaptureAxis, ...] = (CaptureAxis(name="tile", keys=(str(self._keys[0]),)),)

    def probe(self, header: MediaHeader) -> ItemShape:
        """As many times a tile's patches and tokens as there are tiles."""
        return self.shape_of(len(self.family.cut(header.width, header.height)))

    def shape_of(self, num_tiles: int) -> ItemShape:
        """Of an item of so many tiles."""
        return ItemShape.of([self.tile.shape] * num_tiles)

    def measure(self, grid: Grid) -> SegmentShape:
        """A tile; no graph holds another grid."""
        shape = self.tile.shape
        return shape if grid == shape.grid else replace(shape, grid=grid, num_patches=math.prod(grid))

    def prepare(self, image: Image.Image) -> list[Segment]:
        """Tiles of an RGB image; those of one resized picture share it."""
        tiles = [replace(tile, size=self.family.tile_size) for tile in self.family.cut(*image.size)]
        return [self.segment(picture) for picture in cut_out(image, tiles, self.family.pixels.resample)]

    def segment(self, picture: np.ndarray) -> Segment:
        """A tile's pixels `[height, width, 3]`."""
        return self.tile.segment(picture)

    def axis_choices(self, grid: Grid) -> list[AxisKeys]:
        """The one tile size."""
        return [self._keys] if grid == self.tile.grid else []

    def capacity(self, axis_keys: AxisKeys, token_budget: int) -> Capacity:
        """Room for whole tiles."""
        return self.tile.capacity(token_budget)

    def default_budgets(self, axis_keys: AxisKeys, device: str) -> tuple[int, ...]:
        """Numbers of tiles that an image gives, then larger steps."""
        return self.tile.default_budgets(device)

    def exact(self, shapes: Sequence[SegmentShape]) -> tuple[AxisKeys, Capacity]:
        """So many tiles."""
        return self._keys, self.tile.room(len(shapes))

    def sample(self, axis_keys: AxisKeys) -> Segment:
        """A tile of noise."""
        return self.tile.sample()

    def inputs(self, axis_keys: AxisKeys, capacity: Capacity) -> dict[str, TensorSpec]:
        """A row of bytes for each tile, in the order (y, x, channel)."""
        return self.tile.inputs(capacity)

    def fill(
        self, host: Mapping[str, np.ndarray], segments: Sequence[Segment], axis_keys: AxisKeys, capacity: Capacity
    ) -> int:
        """One tile after the other."""
        return self.tile.fill(host, segments)

    def _model(
        self, weights: Mapping[str, torch.Tensor], device: torch.device, dtype: torch.dtype, attention: str
    ) -> EncoderModel:
        from encoder.towers.stock import TileModel

        return TileModel(self.family, weights, device, dtype)


def refuse_layouts(name: str, encoder: EncoderConfig) -> None:
    """Raise ConfigError for layouts, which tiles have none of."""
    if encoder.layouts != ("packed",):
        raise ConfigError(f"{name}: tiles have one size and one layout; leave out layouts {list(encoder.layouts)}")


def cut_out(image: Image.Image, tiles: Sequence[Tile], resample: Image.Resampling) -> list[np.ndarray]:
    """Pixels `[height, width, 3]` of each tile; those of one resized picture share it."""
    pictures: dict[tuple[Box | None, tuple[Size, ...]], np.ndarray] = {}
    cuts = []
    for tile in tiles:
        source = tile.box, tile.resized
        if source not in pictures:
            resized = image.crop(tile.box) if tile.box else image
            for size in tile.resized:
                resized = resized.resize(size, resample)
            pictures[source] = np.asarray(resized)
        cuts.append(_cut(pictures[source], tile))
    return cuts


def _cut(picture: np.ndarray, tile: Tile) -> np.ndarray:
    """The tile out of `[height, width, 3]`."""
    (left, top), (width, height) = tile.corner, size_of(tile)
    part = picture[max(top, 0) : top + height, max(left, 0) : left + width]
    if part.shape[:2] == (height, width):
        return part
    canvas = np.empty((height, width, 3), np.uint8)
    canvas[:] = tile.background
    canvas[max(-top, 0) :, max(-left, 0) :][: part.shape[0], : part.shape[1]] = part
    return canvas
