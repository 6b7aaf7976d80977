"""`Counts`: what a worker has counted since it started, as its report tells it."""

from __future__ import annotations

import threading
from dataclasses import replace

from encoder.errors import PoolClosedError, PoolSaturatedError
from workers.cache import CacheStats
from workers.gpu_loop import GpuLoop
from workers.job import Job
from workers.messages import WorkerStats
from workers.metrics import Meter


class Counts:
    """Thread-safe."""

    def __init__(self, worker_id: str) -> None:
        self._meter = Meter(worker_id)
        self._lock = threading.Lock()
        self._num_items = self._num_failed = self._num_cached = 0

    def settled(self, job: Job) -> None:
        """An item of a caller is settled."""
        if isinstance(job.error, PoolSaturatedError | PoolClosedError):  # it was never taken on board
            return
        with self._lock:
            self._num_items += 1
            self._num_failed += job.error is not None
            self._num_cached += job.cached and job.error is None
        for stage, stage_ms in job.timings_ms.copy().items():  # of one that failed, runs under way still write there
            self._meter.observe("encpool_stage_seconds", stage, value=stage_ms / 1e3)

    def answered(self, num_tokens: int, copy_s: float) -> None:
        """A call's tokens were copied into one array."""
        self._meter.observe("encpool_stage_seconds", "copy_out", value=copy_s)
        self._meter.add("encpool_tokens_total", amount=num_tokens)

    def stats(self, gpu: GpuLoop, cache: CacheStats) -> WorkerStats:
        """These counts, those of the GPU thread and those of the cache."""
        stats = gpu.stats
        return WorkerStats(
            num_items=self._num_items,
            num_failed=self._num_failed,
            num_replays=stats.num_replays,
            num_eager_runs=stats.eager_runs,
            eager_ms=stats.eager_ms,
            segment_hits=stats.hits,
            segment_misses={str(reason): count for reason, count in list(stats.misses.items())},
            useful_patches=stats.useful_patches,
            run_patches=stats.replayed_patches,
            num_cached=self._num_cached,
            cache=cache,
            graph_uses={str(key): replace(use) for key, use in list(stats.uses.items())},
            capture_s=gpu.capture_s,
            samples=self._meter.samples(),
        )
