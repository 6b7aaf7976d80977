"""What preparing an image on the CPU costs beyond Pillow's own work, and how it scales over threads."""

from __future__ import annotations

import io
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from PIL import Image

from encoder.adapters.minicpmv import MiniCPMV
from encoder.helpers import helped_by
from encoder.media import decode_image
from encoder.pictures import draw_picture

SIZE = (1920, 1080)
LIMIT = 2**31


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """Figures for one 1080p JPEG."""

    pillow_ms: float  # decoding and the two resizes, nothing else
    prepare_ms: float  # bytes to segments
    helped_ms: float  # the same by two threads, as a worker does while others are idle
    images_per_s: dict[int, float]  # by number of threads

    @property
    def ratio(self) -> float:
        """Our time over Pillow's."""
        return self.prepare_ms / self.pillow_ms


def measure_preparation(adapter: MiniCPMV, *, repeats: int = 15) -> Preparation:
    """Time one thread against Pillow alone, then threads against one."""
    buffer = io.BytesIO()
    draw_picture(*SIZE, 0).save(buffer, format="JPEG", quality=90)
    encoded = buffer.getvalue()
    plan = adapter.plan(*SIZE)

    def pillow() -> None:
        image = Image.open(io.BytesIO(encoded)).convert("RGB")
        for size in (plan.overview, plan.refined):
            image.resize(size, Image.Resampling.BICUBIC)

    def prepare() -> None:
        adapter.prepare(decode_image(encoded, max_pixels=LIMIT, max_bytes=LIMIT))

    pillow_ms, prepare_ms, helped_ms = [], [], []
    with ThreadPoolExecutor(1) as helper:
        for _ in range(repeats):  # in turns, so that all see the same machine
            pillow_ms.append(_time_ms(pillow))
            prepare_ms.append(_time_ms(prepare))
            with helped_by(helper):
                helped_ms.append(_time_ms(prepare))
    counts = [1 << power for power in range((os.cpu_count() or 1).bit_length()) if 1 << power <= (os.cpu_count() or 1)]
    return Preparation(
        pillow_ms=statistics.median(pillow_ms),
        prepare_ms=statistics.median(prepare_ms),
        helped_ms=statistics.median(helped_ms),
        images_per_s={threads: _rate(prepare, threads, per_thread=min(8, repeats)) for threads in counts},
    )


def _time_ms(run: Callable[[], None]) -> float:
    started_s = time.perf_counter()
    run()
    return (time.perf_counter() - started_s) * 1e3


def _rate(run: Callable[[], None], threads: int, per_thread: int) -> float:
    with ThreadPoolExecutor(threads) as pool:
        started_s = time.perf_counter()
        for future in [pool.submit(run) for _ in range(threads * per_thread)]:
            future.result()
        return threads * per_thread / (time.perf_counter() - started_s)
