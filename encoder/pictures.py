"""Drawn pictures with the look of photos for demo, tests and benchmarks: seeded, any size, cheap."""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageDraw

Size = tuple[int, int]
"""Width and height in pixels."""

TRAFFIC_SIZES: tuple[Size, ...] = (
    (1920, 1080),
    (1280, 720),
    (640, 480),
    (1024, 1024),
    (3024, 4032),
    (800, 600),
    (500, 375),
    (480, 640),
    (1240, 1754),
    (600, 1800),
    (2560, 1440),
    (768, 1024),
    (427, 640),
    (640, 427),
    (336, 336),
    (224, 224),
    (3000, 1000),
    (1080, 1920),
    (1200, 630),
    (512, 512),
)
"""Twenty sizes as they are common on the web and out of cameras; benchmarks take them as their traffic."""

DEMO_SIZES: tuple[Size, ...] = (
    *TRAFFIC_SIZES,
    (1, 1),
    (3, 2),
    (5, 200),
    (64, 64),
    (100, 2000),
    (2000, 100),
    (4000, 40),
    (320, 240),
    (448, 448),
    (449, 447),
    (896, 448),
    (1000, 333),
    (1366, 768),
    (1600, 1200),
    (720, 1480),
    (210, 297),
)
"""The traffic, and shapes that are hard on an encoder: specks, strips, and sizes beside those it likes."""

_GRAIN_PIXELS = 256


def draw_picture(width: int, height: int, seed: int) -> Image.Image:
    """Draw an RGB picture: soft light, a dozen shapes, grain; the same three numbers give the same one."""
    rng = np.random.default_rng((seed, width, height))
    picture = _light(rng, width, height)
    _draw_shapes(ImageDraw.Draw(picture), rng, width, height)
    return _grainy(picture, rng)


def _light(rng: np.random.Generator, width: int, height: int) -> Image.Image:
    corners = rng.integers(30, 226, size=(5, 7, 3), dtype=np.uint8)
    return Image.fromarray(corners).resize((width, height), Image.Resampling.BICUBIC)


def _draw_shapes(draw: ImageDraw.ImageDraw, rng: np.random.Generator, width: int, height: int) -> None:
    for _ in range(12):
        colour = tuple(int(value) for value in rng.integers(0, 256, size=3))
        x, y = rng.uniform(-0.2, 1.0, size=2) * (width, height)
        across, down = rng.uniform(0.05, 0.5, size=2) * (width, height)
        kind = rng.integers(3)
        if kind == 0:
            draw.ellipse((x, y, x + across, y + down), fill=colour)
        elif kind == 1:
            draw.polygon([(x, y + down), (x + across / 2, y), (x + across, y + down)], fill=colour)
        else:
            draw.line((x, y, x + across, y + down), fill=colour, width=max(1, min(width, height) // 40))


def _grainy(picture: Image.Image, rng: np.random.Generator) -> Image.Image:
    pixels = np.asarray(picture).astype(np.int16)
    height, width, _ = pixels.shape
    grain = rng.normal(0, 6, size=(_GRAIN_PIXELS, _GRAIN_PIXELS, 1)).astype(np.int16)
    repeats = (-(-height // _GRAIN_PIXELS), -(-width // _GRAIN_PIXELS), 1)
    pixels += np.tile(grain, repeats)[:height, :width]
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
