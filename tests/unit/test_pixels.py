"""Pixels out of Pillow's memory equal what numpy makes of the image."""

from __future__ import annotations

import gc
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from encoder.pixels import pixels_of

BLOCK_BYTES = 1 << 24  # Pillow's, where nobody asks for others


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 9))
@example(width=1, height=300, seed=0)
@settings(max_examples=60)
def test_pixels_are_those_of_the_image(width: int, height: int, seed: int) -> None:
    image = picture(width, height, seed)
    for each in (image, image.resize((height, width)), image.crop((0, 0, (width + 1) // 2, height))):
        assert np.array_equal(pixels_of(each), np.asarray(each))


@pytest.mark.parametrize("size", [(2048, 2048), (2049, 2050), (4_200_000, 1), (1, 4_200_000), (3000, 4100)])
def test_images_in_several_blocks_are_copied_in_bands(size: tuple[int, int]) -> None:
    assert (4 * size[0] * size[1] > BLOCK_BYTES) == (size != (2048, 2048))
    image = picture(*size)
    assert np.array_equal(pixels_of(image), np.asarray(image))


def test_a_copy_outlives_its_image_and_may_be_written() -> None:
    image = picture(64, 48)
    wanted = np.array(image)
    pixels = pixels_of(image)
    del image
    gc.collect()
    picture(64, 48, 1)
    assert np.array_equal(pixels, wanted)
    pixels[:] = 0


@pytest.mark.parametrize(
    ("setting", "value", "shown"),
    [("PILLOW_ALIGNMENT", "128", "get_alignment() == 128"), ("PILLOW_BLOCK_SIZE", "64k", "get_block_size() == 65536")],
)
def test_pillows_memory_may_be_laid_out_otherwise(setting: str, value: str, shown: str) -> None:
    code = (
        "import numpy as np; from PIL import Image; from encoder.pixels import pixels_of\n"
        "pixels = np.random.default_rng(0).integers(0, 256, (211, 237, 3), dtype=np.uint8)\n"
        "image = Image.fromarray(pixels).rotate(180)\n"
        f"assert Image.core.{shown}\n"
        "assert np.array_equal(pixels_of(image), np.asarray(image))"
    )
    subprocess.run([sys.executable, "-c", code], env=os.environ | {setting: value}, check=True, timeout=60)
