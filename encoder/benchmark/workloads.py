"""What the engine bench encodes."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from encoder.adapters.base import EncoderAdapter, Segment
from encoder.errors import ConfigError
from encoder.pictures import TRAFFIC_SIZES, Size, draw_picture
from encoder.types import SegmentShape

SINGLE_SIZES: tuple[Size, ...] = ((448, 448), (640, 480), (1920, 1080))
VIDEO_FRAMES, VIDEO_SIZE = 64, (1280, 720)
MIXED_IMAGES, MIXED_SIDES = 20, (64, 4096)


FlopsOf = Callable[[Sequence[SegmentShape]], float]
"""Multiplications and additions that segments ask of a model, pads left out."""

Drawn = TypeVar("Drawn")  # what names a picture or clip to be drawn


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Images prepared once; each is the list of its segments."""

    name: str
    images: tuple[tuple[Segment, ...], ...]
    saturated: bool  # many at a time, or one image alone
    flops_of: FlopsOf

    @property
    def segments(self) -> list[Segment]:
        """All segments, image by image."""
        return [segment for image in self.images for segment in image]

    @property
    def flops(self) -> float:
        """Useful multiplications and additions."""
        return self.flops_of([segment.shape for segment in self.segments])

    @property
    def num_patches(self) -> int:
        """Useful patches."""
        return sum(segment.shape.num_patches for segment in self.segments)


def choose(workloads: Sequence[Workload], only: Sequence[str]) -> list[Workload]:
    """Those whose names hold one of these texts; all of them if there is no text. Raises ConfigError if none does."""
    chosen = [workload for workload in workloads if not only or any(text in workload.name for text in only)]
    if not chosen:
        names = ", ".join(repr(workload.name) for workload in workloads)
        raise ConfigError(f"no workload is called {' or '.join(map(repr, only))}; there are {names}")
    return chosen


def image_workloads(
    adapter: EncoderAdapter, flops_of: FlopsOf, *, small: bool, most_ratio: float = math.inf
) -> list[Workload]:
    """Traffic, one image alone, random sizes; `small`: a taste of them, for a CPU.

    Images with one side over `most_ratio` times the other are left out.
    """

    def make(name: str, sizes: Sequence[Size], *, saturated: bool) -> Workload:
        numbered = [(*size, seed) for seed, size in enumerate(sizes) if max(size) <= most_ratio * min(size)]
        return Workload(
            name=name,
            images=prepared(lambda one: adapter.prepare(draw_picture(*one)), numbered),
            saturated=saturated,
            flops_of=flops_of,
        )

    if small:
        return [
            make("traffic", TRAFFIC_SIZES[13:15], saturated=True),
            make("448x448 alone", SINGLE_SIZES[:1], saturated=False),
        ]
    return [
        make("traffic", TRAFFIC_SIZES, saturated=True),
        *(make(f"{w}x{h} alone", [(w, h)], saturated=False) for w, h in SINGLE_SIZES),
        make("random sizes", random_sizes(MIXED_IMAGES, 0), saturated=True),
    ]


def prepared(prepare: Callable[[Drawn], Iterable[Segment]], drawn: Iterable[Drawn]) -> tuple[tuple[Segment, ...], ...]:
    """Segments of each image or clip, made by several threads."""
    with ThreadPoolExecutor() as threads:
        return tuple(threads.map(lambda one: tuple(prepare(one)), drawn))


def random_sizes(count: int, seed: int) -> list[Size]:
    """Both sides log-uniform and independent, so that strips come too."""
    rng = random.Random(seed)
    low, high = map(math.log, MIXED_SIDES)

    def side() -> int:
        return round(math.exp(rng.uniform(low, high)))

    return [(side(), side()) for _ in range(count)]
