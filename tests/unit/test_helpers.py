"""Threads that help with a picture change its time, not its pixels."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from encoder.adapters.registry import load_adapter
from encoder.config import EncoderConfig
from encoder.helpers import COPY_BYTES, copy_all, helped_by, run_all
from encoder.pictures import draw_picture


@pytest.mark.parametrize("model", ["tiny-minicpmv-2.6", "tiny-internvl", "tiny-idefics3", "tiny-gemma3"])
def test_adapters_prepare_the_same_segments_with_helpers(model: str) -> None:
    adapter = load_adapter(EncoderConfig(model=model))
    image = draw_picture(1001, 701, 3)
    alone = adapter.prepare(image)
    with ThreadPoolExecutor(2) as threads, helped_by(threads):
        together = adapter.prepare(image)
    assert [segment.shape for segment in together] == [segment.shape for segment in alone]
    for one, other in zip(together, alone, strict=True):
        assert np.array_equal(one.patches_PC, other.patches_PC)


def test_tasks_run_at_the_same_time_and_answer_in_order() -> None:
    meeting = threading.Barrier(3, timeout=10)

    def task(number: int) -> int:
        meeting.wait()
        return number

    with ThreadPoolExecutor(2) as threads, helped_by(threads):
        assert run_all([lambda number=number: task(number) for number in range(3)]) == [0, 1, 2]
    names = run_all([lambda: threading.current_thread().name] * 3)
    assert set(names) == {threading.current_thread().name}


def test_what_a_helper_raises_is_raised() -> None:
    def fail() -> int:
        raise ValueError("broken")

    with ThreadPoolExecutor(1) as threads, helped_by(threads), pytest.raises(ValueError, match="broken"):
        run_all([fail, lambda: 1])


@pytest.mark.parametrize("sizes", [[3 * COPY_BYTES], [10, COPY_BYTES // 2, 5 * COPY_BYTES + 7, 0, 3], [100] * 40, []])
def test_copies_are_whole_with_helpers(sizes: list[int]) -> None:
    rng = np.random.default_rng(0)
    sources = [rng.integers(0, 256, size, dtype=np.uint8) for size in sizes]
    targets = [np.zeros(size, np.uint8) for size in sizes]
    with ThreadPoolExecutor(3) as threads, helped_by(threads):
        copy_all(list(zip(targets, sources, strict=True)))
    for target, source in zip(targets, sources, strict=True):
        assert np.array_equal(target, source)


def test_rows_are_broadcast_with_helpers() -> None:
    source = np.random.default_rng(0).integers(0, 256, (5000, 1, 588), dtype=np.uint8)
    target = np.zeros((5000, 2, 588), np.uint8)
    with ThreadPoolExecutor(3) as threads, helped_by(threads):
        copy_all([(target, source)])
    assert np.array_equal(target, np.repeat(source, 2, axis=1))
