"""Pictures of any size and shape, for every preset: at least a token, or a typed refusal before anything is decoded."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from encoder.adapters.base import EncoderAdapter
from encoder.adapters.registry import families, load_adapter
from encoder.config import EncoderConfig
from encoder.errors import BadMediaError
from encoder.media import MediaHeader
from encoder.types import Grid

PRESETS = [preset for family in families().values() for preset in family.presets]
SMALL = [preset for preset in PRESETS if preset.startswith("tiny-")]
SIDES = st.one_of(st.integers(1, 5000), st.sampled_from([1, 2, 3, 5000]), st.integers(1, 40))
THIN = [(1, 5000), (5000, 1), (1, 65_500), (4001, 3), (200, 1), (1, 201), (1, 1)]


@cache
def adapter_of(preset: str) -> EncoderAdapter:
    return load_adapter(EncoderConfig(model=preset))


def probed(adapter: EncoderAdapter, width: int, height: int) -> tuple[Grid, ...] | None:
    """Grids that make sense; None: it is refused, by the size that it came with."""
    try:
        shape = adapter.probe(MediaHeader(width=width, height=height))
    except BadMediaError as error:
        said = str(error)
    else:
        said = ""
    if said:
        assert f"picture of {width}x{height}" in said, adapter.encoder
        return None
    assert shape.num_tokens >= 1, (adapter.encoder, width, height)
    assert min(length for grid in shape.grids for length in grid) >= 1, (adapter.encoder, width, height, shape.grids)
    return shape.grids


def prepared(adapter: EncoderAdapter, width: int, height: int) -> tuple[Grid, ...] | None:
    try:
        segments = adapter.prepare(Image.new("RGB", (width, height)))
    except BadMediaError:
        return None
    return tuple(segment.shape.grid for segment in segments)


@settings(max_examples=60, deadline=None)
@given(width=SIDES, height=SIDES)
@example(width=1, height=65_500)
@example(width=4001, height=3)
@example(width=200, height=1)
def test_an_image_of_any_size_has_tokens_or_is_refused_from_its_header(width: int, height: int) -> None:
    for preset in PRESETS:
        probed(adapter_of(preset), width, height)


@pytest.mark.parametrize(("width", "height"), THIN)
def test_thin_images_are_prepared_as_probed_or_refused_by_both(width: int, height: int) -> None:
    for preset in SMALL:
        adapter = adapter_of(preset)
        assert prepared(adapter, width, height) == probed(adapter, width, height), preset


@settings(max_examples=15, deadline=None)
@given(width=st.integers(1, 300), height=st.integers(1, 300))
def test_small_images_are_prepared_as_probed(width: int, height: int) -> None:
    for preset in SMALL:
        adapter = adapter_of(preset)
        assert prepared(adapter, width, height) == probed(adapter, width, height), preset


@pytest.mark.parametrize("size", [(1, 5000), (5000, 1)])
@pytest.mark.parametrize("preset", ["random-pixtral-12b", "random-mistral-small-3.1", "tiny-pixtral", "tiny-clip"])
def test_where_nothing_would_be_left_of_an_image_the_message_says_what_to_do(
    preset: str, size: tuple[int, int]
) -> None:
    adapter = adapter_of(preset)
    with pytest.raises(BadMediaError, match=r"picture of \d+x\d+: .*; crop it"):
        adapter.probe(MediaHeader(width=size[0], height=size[1]))
    with pytest.raises(BadMediaError, match="crop it"):
        adapter.prepare(Image.new("RGB", size))
