"""What families on transformers' modules say of themselves: those of tiles, of tiles of several sizes, of any grids."""

# Shapes: N tiles, H and W pixels of a tile, T tokens (of a tile), E width of a token; P patches of a run, C numbers of
# a patch.

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from PIL import Image

from encoder.adapters.cutting import Tile
from encoder.adapters.tile_kind import Size, TileKind
from encoder.types import Grid

if TYPE_CHECKING:
    import numpy as np
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Pixels:
    """How a family makes numbers of pictures."""

    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    resample: Image.Resampling = Image.Resampling.BICUBIC


class StockFamily(Protocol):
    """What all of them say."""

    hidden_size: int
    pixels: Pixels

    @property
    def renames(self) -> Sequence[tuple[str, str]]:
        """Regular expressions and replacements, from names of modules' tensors to released ones."""

    def modules(self) -> Mapping[str, torch.nn.Module]:
        """transformers' modules, by the prefix of their tensors in released checkpoints, such as "vision_tower.".

        Imports torch.
        """


class TileFamily(StockFamily, Protocol):
    """Tiles of one size: the whole image resized, or pieces of it."""

    tile_size: Size
    grid: Grid  # of a tile
    num_tokens: int  # of a tile

    def cut(self, width: int, height: int) -> list[Tile]:
        """The tiles of an image of this size, in the order of its tokens."""

    def bind(self, modules: Mapping[str, Any]) -> Callable[[torch.Tensor], torch.Tensor]:
        """The forward over loaded modules: from pixels `[N, 3, H, W]` to tokens `[N, T, E]`; safe to capture."""


@runtime_checkable
class ViewFamily(StockFamily, Protocol):
    """Tiles of several sizes, each with tokens of its own."""

    @property
    def views(self) -> Mapping[str, TileKind]:
        """The kinds of tiles, no two of one grid or size."""

    def cut(self, width: int, height: int) -> list[Tile]:
        """The tiles of an image of this size, in the order of its tokens; a tile's size says which view it is."""

    def bind(self, modules: Mapping[str, Any]) -> Mapping[str, Callable[[torch.Tensor], torch.Tensor]]:
        """The forward of each view, as a `TileFamily` has one."""


Table = tuple[tuple[int, ...], str]
"""Shape of a patch's row, and its dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """What the forward of a grid family gets: the rows of a run and where segments end."""

    pixels_PC: torch.Tensor  # uint8, each patch in the order (y, x, channel), or (frame, y, x, channel)
    tables: Mapping[str, torch.Tensor]
    cu_seqlens: torch.Tensor  # int32 `[segments + 1]`; what comes after the last offset is padding


class GridFamily(StockFamily, Protocol):
    """Patches of any grids."""

    patch_size: int
    merge: int  # a token is a square of so many patches a side; they follow one another
    pooled_patches: int  # 0; or a segment gives one token, and has at most about so many patches

    @property
    def inner_order(self) -> Sequence[int]:
        """Of the patches of a token; empty: row by row."""

    @property
    def tables(self) -> Mapping[str, Table]:
        """What it needs to know of each patch beside its pixels."""

    def cut(self, width: int, height: int) -> list[Tile]:
        """The pieces of an image of this size, each a segment, in the order of their tokens."""

    def rows(self, grid: Grid) -> Mapping[str, np.ndarray]:
        """The tables' rows for the patches of a grid, square by square of a token's patches."""

    def bind(self, modules: Mapping[str, Any]) -> Callable[[Rows], torch.Tensor]:
        """The forward over loaded modules, to tokens `[T, E]`; safe to capture. Attention keeps to segments."""
