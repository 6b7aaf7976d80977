"""What grids determine is kept for as many grids as its bytes allow, however large they are."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from encoder.adapters.array_cache import MAX_BYTES, cached_arrays
from encoder.adapters.frame_indices import frame_indices
from encoder.adapters.interpolation import bicubic_taps, bilinear_taps


class Computed:
    """Computes arrays of so many bytes and remembers which."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, num_bytes: int) -> tuple[np.ndarray]:
        self.sizes.append(num_bytes)
        return (np.zeros(num_bytes, np.uint8),)


def asked(*sizes: int, max_bytes: int = 100) -> list[int]:
    computed = Computed()
    cached = cached_arrays(computed.__call__, max_bytes=max_bytes)
    for size in sizes:
        assert cached(size)[0].nbytes == size
    return computed.sizes


def test_what_was_asked_longest_ago_goes_first() -> None:
    assert asked(40, 50, 40, 50) == [40, 50]
    assert asked(40, 50, 40, 20, 40, 50) == [40, 50, 20, 50]


def test_what_is_too_large_by_itself_is_computed_each_time() -> None:
    assert asked(101, 101, 100, 100) == [101, 101, 100]


def test_threads_that_ask_at_the_same_time_keep_within_the_bound() -> None:
    cached = cached_arrays(Computed().__call__, max_bytes=100)
    with ThreadPoolExecutor(8) as threads:
        sizes = [number % 40 for number in range(4000)]
        assert [arrays[0].nbytes for arrays in threads.map(cached, sizes)] == sizes


@pytest.mark.parametrize(
    "compute",
    [
        lambda rows: bicubic_taps(rows, 400, 2, 24),
        lambda rows: bilinear_taps(rows, 2000, 2, 24),
        lambda rows: frame_indices(rows, 4000, 2, 0),
    ],
    ids=["bicubic", "bilinear", "frames"],
)
def test_very_diverse_large_images_do_not_fill_the_host(compute: Callable[[int], object]) -> None:
    tracemalloc.start()
    for rows in range(202, 230, 2):
        compute(rows)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept <= MAX_BYTES * 1.02
