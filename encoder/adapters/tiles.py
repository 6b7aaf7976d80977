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
from encoder.errors import ConfigError
from encoder.types import AxisKeys, Capacity, Grid, ItemShape, SegmentShape

if TYPE_CHECKING:
    import torch

    from encoder.config import EncoderConfig, Precision
    from encoder.media import MediaHeader

Size = tuple[int, int]
"""Width and height in pixels."""

Box = tuple[int, int, int, int]
"""Left, top, right and bottom, as Pillow has them."""

LADDER = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 20, 24, 32, 48, 64)  # tiles
CPU_LADDER = (1, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """A piece of an image: the image or a box of it, resized to these sizes one after the other, and cut from that."""

    resized: tuple[Size, ...]
    corner: tuple[int, int] = (0, 0)  # x and y where the tile begins in what was resized; beyond that it is black
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


class TileAdapter:
    """Adapter of one checkpoint of a tile family. Implements `EncoderAdapter`."""

    path = "image"

    def __init__(self, family: TileFamily, config: Mapping[str, Any], name: str, encoder: EncoderConfig) -> None:
        """Raises ConfigError for options that only packed encoders have."""
        if encoder.layouts != ("packed",):
            raise ConfigError(f"{name}: tiles have one size and one layout; leave out layouts {list(encoder.layouts)}")
        self.encoder, self.family = name, family
        self.hidden_size = family.hidden_size
        self._config, self._max_segments = dict(config), encoder.max_segments_per_graph
        self._keys: AxisKeys = ("x".join(map(str, family.tile_size)),)
        self.axes: tuple[CaptureAxis, ...] = (CaptureAxis(name="tile", keys=(str(self._keys[0]),)),)
        frames, rows, columns = family.grid
        self._tile = SegmentShape(grid=family.grid, num_patches=frames * rows * columns, num_tokens=family.num_tokens)

    def probe(self, header: MediaHeader) -> ItemShape:
        """As many times a tile's patches and tokens as there are tiles."""
        return self.shape_of(len(self.family.cut(header.width, header.height)))

    def shape_of(self, num_tiles: int) -> ItemShape:
        """Of an item of so many tiles."""
        return ItemShape(
            grids=(self._tile.grid,) * num_tiles,
            num_patches=num_tiles * self._tile.num_patches,
            num_tokens=num_tiles * self._tile.num_tokens,
        )

    def measure(self, grid: Grid) -> SegmentShape:
        """A tile; no graph holds another grid."""
        return self._tile if grid == self._tile.grid else replace(self._tile, grid=grid, num_patches=math.prod(grid))

    def prepare(self, image: Image.Image) -> list[Segment]:
        """Tiles of an RGB image; those of one resized picture share it."""
        tiles = [replace(tile, size=self.family.tile_size) for tile in self.family.cut(*image.size)]
        return [self.segment(picture) for picture in cut_out(image, tiles, self.family.pixels.resample)]

    def segment(self, picture: np.ndarray) -> Segment:
        """A tile's pixels `[height, width, 3]`."""
        return Segment(shape=self._tile, patches_PC=np.ascontiguousarray(picture).reshape(1, -1))

    def axis_choices(self, grid: Grid) -> list[AxisKeys]:
        """The one tile size."""
        return [self._keys] if grid == self._tile.grid else []

    def capacity(self, axis_keys: AxisKeys, token_budget: int) -> Capacity:
        """Room for whole tiles."""
        num_tiles = min(token_budget // self._tile.num_tokens, self._max_segments or token_budget)
        if num_tiles < 1:
            raise ConfigError(
                f"token budget {token_budget} holds no tile of {self._tile.num_tokens} tokens; "
                f"use multiples of {self._tile.num_tokens}"
            )
        return self._room(num_tiles)

    def _room(self, num_tiles: int) -> Capacity:
        return Capacity(
            patches=num_tiles * self._tile.num_patches,
            segments=num_tiles,
            tokens=num_tiles * self._tile.num_tokens,
            longest=self._tile.num_patches,
        )

    def default_budgets(self, axis_keys: AxisKeys, device: str) -> tuple[int, ...]:
        """Numbers of tiles that an image gives, then larger steps."""
        most = self._max_segments or max(LADDER)
        counts = [count for count in (CPU_LADDER if device == "cpu" else LADDER) if count <= most] or [most]
        return tuple(count * self._tile.num_tokens for count in counts)

    def exact(self, shapes: Sequence[SegmentShape]) -> tuple[AxisKeys, Capacity]:
        """So many tiles."""
        return self._keys, self._room(len(shapes))

    def sample(self, axis_keys: AxisKeys) -> Segment:
        """A tile of noise."""
        width, height = self.family.tile_size
        return self.segment(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))

    def inputs(self, axis_keys: AxisKeys, capacity: Capacity) -> dict[str, TensorSpec]:
        """A row of bytes for each tile, in the order (y, x, channel)."""
        width, height = self.family.tile_size
        return {"pixels": TensorSpec(shape=(capacity.segments, height * width * 3), dtype="uint8")}

    def fill(
        self,
        host: Mapping[str, np.ndarray],
        segments: Sequence[Segment],
        axis_keys: AxisKeys,
        capacity: Capacity,
    ) -> int:
        """One tile after the other."""
        for row, segment in enumerate(segments):
            host["pixels"][row] = segment.patches_PC[0]
        return len(segments)

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Released names and shapes of the vision part."""
        from encoder.towers.stock import weight_shapes

        return weight_shapes(self.family)

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
        """transformers' modules on the device."""
        from encoder.towers.stock import TileModel, check_native

        check_native(self.encoder, precision)
        return TileModel(self.family, weights, device, dtype)


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
        cuts.append(_cut(pictures[source], tile.corner, size_of(tile)))
    return cuts


def _cut(picture: np.ndarray, corner: tuple[int, int], size: Size) -> np.ndarray:
    """`size` pixels of `[height, width, 3]` from the corner on, black where there are none."""
    (x, y), (width, height) = corner, size
    cut = picture[y : y + height, x : x + width]
    missing = height - cut.shape[0], width - cut.shape[1]
    return np.pad(cut, ((0, missing[0]), (0, missing[1]), (0, 0))) if any(missing) else cut
