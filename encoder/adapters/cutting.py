"""How pictures are cut: tiles out of an image that is resized, and rows of patches out of a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
from PIL import Image

from encoder.adapters.tile_kind import Size
from encoder.helpers import run_all
from encoder.pixels import pixels_of

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


@lru_cache(maxsize=65_536)
def arrangement(width: int, height: int, tile: Size, least: int, most: int) -> tuple[int, int]:
    """Columns and rows of tiles nearest to the image in ratio of sides, at least and at most so many tiles.

    Of two equally near it is the larger one, while the image has half its pixels. After GotOcr2's image processor in
    transformers, which InternVL uses; LFM2-VL and DeepSeek-OCR 2 have the same rule.
    """
    candidates = [
        (columns, rows)
        for columns in range(1, most + 1)
        for rows in range(1, most + 1)
        if least <= columns * rows <= most
    ]
    best, best_difference = (1, 1), float("inf")
    for columns, rows in sorted(candidates, key=lambda counts: counts[0] * counts[1]):
        difference = abs(width / height - columns / rows)
        large_enough = width * height > 0.5 * tile[0] * tile[1] * columns * rows
        if difference < best_difference or (difference == best_difference and large_enough):
            best, best_difference = (columns, rows), difference
    return best


def cut_out(image: Image.Image, tiles: Sequence[Tile], resample: Image.Resampling) -> list[np.ndarray]:
    """Pixels `[height, width, 3]` of each tile; those of one resized picture share it."""
    sources = list(dict.fromkeys((tile.box, tile.resized) for tile in tiles))
    pictures = run_all([partial(_resize, image, *source, resample) for source in sources])
    picture_of = dict(zip(sources, pictures, strict=True))
    return [_cut(picture_of[tile.box, tile.resized], tile) for tile in tiles]


def _resize(image: Image.Image, box: Box | None, sizes: tuple[Size, ...], resample: Image.Resampling) -> np.ndarray:
    """Pixels of the image or a box of it, resized to these sizes one after the other."""
    if box:
        image = image.crop(box)
    for size in sizes:
        image = image.resize(size, resample)
    return pixels_of(image)


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


def patch_rows(picture: np.ndarray, side: int, merge: int = 1) -> np.ndarray:
    """Rows (y, x, channel) of the patches of `[height, width, 3]`, `[tokens, merge ** 2, side * side * 3]`.

    A token is a square of `merge` patches a side; tokens and the patches within them come row by row.
    """
    rows, columns = picture.shape[0] // (side * merge), picture.shape[1] // (side * merge)
    squares = picture.reshape(rows, merge, side, columns, merge, side * 3).transpose(0, 3, 1, 4, 2, 5)
    return squares.reshape(rows * columns, merge**2, side * side * 3)
