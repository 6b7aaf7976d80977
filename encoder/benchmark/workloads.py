"""What the engine bench encodes, and the arithmetic it has to do for it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from encoder.adapters.base import Segment
from encoder.adapters.minicpmv import MiniCPMV
from encoder.errors import ConfigError
from encoder.pictures import TRAFFIC_SIZES, Size, draw_picture
from encoder.types import SegmentShape

SINGLE_SIZES: tuple[Size, ...] = ((448, 448), (640, 480), (1920, 1080))
VIDEO_FRAMES, VIDEO_SIZE = 64, (1280, 720)
MIXED_IMAGES, MIXED_SIDES = 20, (64, 4096)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Images prepared once; each is the list of its segments."""

    name: str
    images: tuple[tuple[Segment, ...], ...]
    saturated: bool  # many at a time, or one image alone
    flops_of: Callable[[Sequence[SegmentShape]], float]  # what segments ask of the model, pads left out

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


def make_workloads(adapter: MiniCPMV, frames_adapter: MiniCPMV, *, small: bool = False) -> list[Workload]:
    """The four workloads: (a) traffic, (b) one image alone, (c) random sizes, (d) video frames without slicing.

    `small`: a taste of them, for a CPU.
    """
    if small:
        return [
            _workload(adapter, "traffic", TRAFFIC_SIZES[14:16], saturated=True),
            _workload(adapter, "448x448 alone", SINGLE_SIZES[:1], saturated=False),
            _workload(frames_adapter, "video", [VIDEO_SIZE] * 2, saturated=True),
        ]
    return [
        _workload(adapter, "traffic", TRAFFIC_SIZES, saturated=True),
        *(_workload(adapter, f"{w}x{h} alone", [(w, h)], saturated=False) for w, h in SINGLE_SIZES),
        _workload(adapter, "random sizes", random_sizes(MIXED_IMAGES, 0), saturated=True),
        _workload(frames_adapter, "video", [VIDEO_SIZE] * VIDEO_FRAMES, saturated=True),
    ]


def _workload(adapter: MiniCPMV, name: str, sizes: Sequence[Size], *, saturated: bool) -> Workload:
    numbered = [(*size, seed) for seed, size in enumerate(sizes)]
    with ThreadPoolExecutor() as threads:
        images = tuple(threads.map(lambda one: tuple(adapter.prepare(draw_picture(*one))), numbered))
    return Workload(name=name, images=images, saturated=saturated, flops_of=partial(useful_flops, adapter))


def random_sizes(count: int, seed: int) -> list[Size]:
    """Both sides log-uniform and independent, so that strips come too."""
    rng = random.Random(seed)
    low, high = map(math.log, MIXED_SIDES)

    def side() -> int:
        return round(math.exp(rng.uniform(low, high)))

    return [(side(), side()) for _ in range(count)]


def useful_flops(adapter: MiniCPMV, shapes: Sequence[SegmentShape]) -> float:
    """Multiplications and additions that these segments ask of tower and resampler, as released, pads left out.

    What does not depend on the image (the projection of the queries) is not counted.
    """
    sizes = adapter.sizes
    width, tokens, queries = sizes.width, sizes.token_width, sizes.queries
    layers = sizes.num_layers - sizes.drop_last_layer
    per_patch = 2 * sizes.patch_bytes * width + layers * 2 * (4 * width**2 + 2 * width * sizes.mlp_width)
    per_patch += 2 * width * tokens + 2 * 2 * tokens**2 + 4 * queries * tokens  # projection, K and V, cross-attention
    per_slice = 2 * 2 * queries * tokens**2  # output projections of the tokens
    return sum(shape.num_patches * (per_patch + layers * 4 * shape.num_patches * width) + per_slice for shape in shapes)
