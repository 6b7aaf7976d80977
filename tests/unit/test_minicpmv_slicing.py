"""Slicing against the specification's table, row by row."""

from __future__ import annotations

import csv
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from encoder.adapters.minicpmv import MiniCPMV
from encoder.adapters.minicpmv_slicing import plan_slices
from encoder.adapters.registry import load_adapter
from encoder.config import EncoderConfig
from encoder.media import MediaHeader

TABLE = list(csv.DictReader((Path(__file__).parent / "minicpmv_slices.csv").read_text().splitlines()))


def adapter(version: str, max_slice_nums: int = 9) -> MiniCPMV:
    made = load_adapter(EncoderConfig(model=f"tiny-minicpmv-{version}", max_slice_nums=max_slice_nums))
    assert isinstance(made, MiniCPMV)
    return made


def header(width: int, height: int) -> MediaHeader:
    return MediaHeader(width=width, height=height, format="PNG", num_frames=1, note=None)


def grids_as_text(row: dict[str, str]) -> list[str]:
    """`24x43;8*34x30` as one entry a slice."""
    overview, *others = row["tgt_sizes"].split(";")
    return [overview, *(grid for other in others for count, grid in [other.split("*")] for _ in range(int(count)))]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row['width']}x{row['height']}-{row['max_slice_nums']}")
def test_slices_equal_the_table(row: dict[str, str]) -> None:
    wanted = SimpleNamespace(**{key: int(value) for key, value in row.items() if key != "tgt_sizes"})
    plan = plan_slices(wanted.width, wanted.height, max_slice_nums=wanted.max_slice_nums)
    assert (plan.columns, plan.rows) == (wanted.grid_cols, wanted.grid_rows)
    assert plan.overview == (wanted.source_w, wanted.source_h)
    assert plan.refined == (wanted.refine_w, wanted.refine_h)
    for version, num_tokens in (("2.5", wanted.tokens_q96), ("2.6", wanted.tokens_q64), ("4.0", wanted.tokens_q64)):
        shape = adapter(version, wanted.max_slice_nums).probe(header(wanted.width, wanted.height))
        assert [f"{rows}x{columns}" for _, rows, columns in shape.grids] == grids_as_text(row)
        assert shape.num_patches == wanted.num_patches
        assert shape.num_tokens == num_tokens
        assert max(rows * columns for _, rows, columns in shape.grids) == wanted.max_patches


@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(1, 12))
@settings(max_examples=300, deadline=None)
def test_slices_of_any_image_cover_it(width: int, height: int, max_slice_nums: int) -> None:
    plan = plan_slices(width, height, max_slice_nums=max_slice_nums)
    assert plan.columns * plan.rows <= max_slice_nums
    assert all(side % 14 == 0 and side > 0 for side in plan.overview)
    if plan.columns:
        slice_width, slice_height = plan.slice_size
        assert (slice_width * plan.columns, slice_height * plan.rows) == plan.refined
        assert slice_width % 14 == slice_height % 14 == 0


@given(st.integers(1, 400), st.integers(1, 400))
@settings(max_examples=25, deadline=None)
def test_prepared_segments_have_the_probed_sizes(width: int, height: int) -> None:
    encoder = adapter("2.6")
    segments = encoder.prepare(Image.new("RGB", (width, height)))
    assert tuple(segment.shape.grid for segment in segments) == encoder.probe(header(width, height)).grids
    assert all(segment.patches_PC.shape == (segment.shape.num_patches, 588) for segment in segments)


@pytest.mark.parametrize(("width", "height"), [(4000, 100), (1, 32_000), (32_000, 1)])
def test_strips_are_cut_like_any_image(width: int, height: int) -> None:
    encoder = adapter("2.6")
    shape = encoder.probe(header(width, height))
    segments = encoder.prepare(Image.new("RGB", (width, height)))
    assert tuple(segment.shape.grid for segment in segments) == shape.grids
    assert max(max(grid) for grid in shape.grids) > 70
