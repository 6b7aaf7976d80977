"""How MiniCPM-V's slices lie in graphs: which key takes a grid, and how much room a graph has."""

from __future__ import annotations

import pytest

from encoder.adapters.layouts import PACKED, SegmentLayouts
from encoder.adapters.minicpmv_slicing import plan_slices
from encoder.types import Grid

LAYOUTS = SegmentLayouts(
    (PACKED, "24x43", "<=70x70", "<=32x64", "<=32x32"), tokens=64, nominal_patches=1024, max_segments=None
)


@pytest.mark.parametrize(
    ("grid", "keys"),
    [
        ((1, 24, 43), ["24x43", "<=32x64", "<=70x70", PACKED]),
        ((1, 32, 32), ["<=32x32", "<=32x64", "<=70x70", PACKED]),
        ((1, 33, 20), ["<=70x70", PACKED]),
        ((1, 10, 64), ["<=32x64", "<=70x70", PACKED]),
        ((1, 2, 80), [PACKED]),
        ((1, 80, 2), [PACKED]),
    ],
)
def test_a_grid_goes_to_its_own_rectangle_then_to_the_smallest_that_covers_it(grid: Grid, keys: list[str]) -> None:
    assert LAYOUTS.choices(grid) == [(key,) for key in keys]


@pytest.mark.parametrize("ratio", [0.25, 0.3, 0.5, 0.75, 1.0, 1.33, 1.78, 2.0, 3.0, 4.0])
def test_the_smallest_packed_graph_holds_any_slice_of_common_ratio(ratio: float) -> None:
    plan = plan_slices(round(1000 * ratio), 1000)
    room = LAYOUTS.capacity((PACKED,), 64)
    for width, height in [plan.overview, *([plan.slice_size] if plan.columns else [])]:
        assert width * height // 14**2 <= min(room.patches, room.longest)


def test_a_packed_graph_takes_no_segment_far_over_the_nominal_size_however_large_it_is() -> None:
    """Attention plans are made for the longest segment a graph may hold."""
    assert LAYOUTS.capacity((PACKED,), 64 * 32).longest == 1280
