"""How MiniCPM-V 2.5, 2.6 and 4.0 cut an image into slices. Pure arithmetic on doubles.

The order of the candidates and the exact expressions decide ties (squares), so they are kept as released:
OpenBMB's `image_processing_minicpmv.py`, functions `find_best_resize`, `get_refine_size`, `get_sliced_grid`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from encoder.adapters.cutting import Tile, grid_of_tiles
from encoder.adapters.tile_kind import Size


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicePlan:
    """The resizes and cuts of one image. Without a grid, `columns` and `rows` are 0 and there is only the overview."""

    overview: Size
    columns: int
    rows: int
    refined: Size  # what the image is resized to before it is cut; (0, 0) without a grid

    @property
    def slice_size(self) -> Size:
        """Size of each slice but the overview."""
        return self.refined[0] // self.columns, self.refined[1] // self.rows

    @property
    def tiles(self) -> list[Tile]:
        """The overview, then the slices row by row."""
        overview = Tile(resized=(self.overview,))
        return [overview, *grid_of_tiles((self.refined,), self.slice_size)] if self.columns else [overview]


def _near(length: float, step: int) -> int:
    """The multiple of `step` nearest to `length`, halves to the even multiple, at least one step."""
    return max(round(length / step) * step, step)


def _fit_area(width: float, height: float, scale_resolution: int, patch_size: int) -> Size:
    """Same aspect ratio, area near `scale_resolution` squared, both sides multiples of the patch size."""
    ratio = width / height
    fit_height = int(scale_resolution / math.sqrt(ratio))
    fit_width = int(fit_height * ratio)  # from the cut height, as released
    return _near(fit_width, patch_size), _near(fit_height, patch_size)


def _best_grid(width: int, height: int, scale_resolution: int, max_slice_nums: int) -> tuple[int, int] | None:
    """Columns and rows whose ratio is nearest to the image's, on a log scale; None for small images."""
    wanted = min(math.ceil(width * height / (scale_resolution * scale_resolution)), max_slice_nums)
    if wanted <= 1:
        return None
    log_ratio = math.log(width / height)
    best, best_error = (1, 1), math.inf
    for num_slices in (wanted - 1, wanted, wanted + 1):
        if num_slices == 1 or num_slices > max_slice_nums:
            continue
        for columns in range(1, num_slices + 1):
            if num_slices % columns:
                continue
            rows = num_slices // columns
            error = abs(log_ratio - math.log(columns / rows))
            if error < best_error:
                best, best_error = (columns, rows), error
    return best


def plan_slices(
    width: int, height: int, *, max_slice_nums: int = 9, scale_resolution: int = 448, patch_size: int = 14
) -> SlicePlan:
    """Plan the slices of an image of `width` x `height` pixels."""
    overview = _fit_area(width, height, scale_resolution, patch_size)
    grid = _best_grid(width, height, scale_resolution, max_slice_nums)
    if grid is None:
        return SlicePlan(overview=overview, columns=0, rows=0, refined=(0, 0))
    columns, rows = grid
    slice_width, slice_height = _fit_area(
        _near(width, columns) / columns, _near(height, rows) / rows, scale_resolution, patch_size
    )
    return SlicePlan(
        overview=overview, columns=columns, rows=rows, refined=(slice_width * columns, slice_height * rows)
    )
