"""`Intake`: an item's way from its call to the GPU thread's queue, and its end.

An item is answered from the cache, or joins an identical one, or is admitted; the decode threads turn its bytes into
segments; whatever becomes of it, it is settled here once.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from encoder.errors import DeadlineError, EncodeError, EncoderPoolError
from encoder.helpers import helped_by
from encoder.pixels import keep_memory
from encoder.runner import EncoderRunner
from workers.batcher import Batcher
from workers.cache import CacheStats, EmbeddingCache
from workers.cache_keys import content_digest, embedding_key, runner_fingerprint
from workers.config import WorkerConfig
from workers.counts import Counts
from workers.flights import Flights
from workers.gpu_loop import GpuLoop
from workers.job import Job
from workers.messages import EncodeItem
from workers.priority import Priority

logger = logging.getLogger(__name__)


class Intake:
    """Every method may come from any thread."""

    def __init__(
        self,
        config: WorkerConfig,
        batcher: Batcher,
        counts: Counts,
        *,
        on_settled: Callable[[int], None],
        now_s: Callable[[], float],
    ) -> None:
        """`on_settled` hears the lease of every item, once, whatever became of it."""
        self._batcher = batcher
        self._counts = counts
        self._on_settled = on_settled
        self._now_s = now_s
        num_threads = config.decode_threads or min(16, max(2, os.cpu_count() or 2))
        keep_memory(2 * num_threads)
        self._decoders = [
            threading.Thread(target=self._decode_for_ever, name=f"decode-{number}", daemon=True)
            for number in range(num_threads)
        ]
        self._helpers = ThreadPoolExecutor(num_threads, thread_name_prefix="help")
        self._num_decoding, self._decoding = 0, threading.Lock()
        self._aside = ThreadPoolExecutor(1, thread_name_prefix="aside")  # for what no answer waits for
        self._fingerprint = b""  # of the encoder, once it is known
        self._flights: Flights | None = None  # with a cache
        if config.cache_bytes:
            self._flights = Flights(
                EmbeddingCache(config.cache_bytes), release=batcher.release, later=self._later, now_s=now_s
            )

    def start(self) -> None:
        """Begin decoding what is entered, until the batcher is aborted."""
        for thread in self._decoders:
            thread.start()

    def know(self, runner: EncoderRunner) -> None:
        """Say what encodes here, before any item comes: what is kept is kept under its name."""
        if self._flights is not None:
            self._fingerprint = runner_fingerprint(runner)

    def job(self, item: EncodeItem, gpu: GpuLoop, priority: Priority) -> Job:
        """A job for the item, to be entered."""
        job = Job(
            cost_ms=gpu.costs.quote(item.shape.grids).cost_ms,
            deadline_s=None if item.timeout_s is None else self._now_s() + item.timeout_s,
            num_bytes=item.encoded.nbytes,
            priority=priority,
        )
        job.on_settled = lambda job: self._settle(job, item.lease_id)
        return job

    def enter(self, job: Job, item: EncodeItem, gpu: GpuLoop, *, use_cache: bool) -> None:
        """Answer the item from the cache, let it wait for an identical one, or begin its work."""
        if self._flights is None or item.scope is None or not use_cache:
            self._begin(job, item, gpu)
            return
        started_s = self._now_s()
        key = embedding_key(content_digest(item.encoded.data), fingerprint=self._fingerprint, scope=item.scope)
        job.on_settled = lambda job: self._settle(job, item.lease_id, key)
        job.timings_ms["cache"] = (self._now_s() - started_s) * 1e3
        self._flights.enter(key, item.shape, job, lambda work: self._begin(work, item, gpu))

    def find(self, contents: Sequence[bytes], scope: str) -> list[Job]:
        """Jobs that hold what the cache has of these content digests, `cached` where it has anything."""
        jobs = []
        for content in contents:
            key = embedding_key(content, fingerprint=self._fingerprint, scope=scope)
            found = None if self._flights is None else self._flights.cache.find(key)
            job = Job(cost_ms=0.0)
            if found is not None:
                job.cached = True
                job.complete([found[0]])
            jobs.append(job)
        return jobs

    def cache_stats(self) -> CacheStats:
        """The cache's counts, all zero without one."""
        return CacheStats() if self._flights is None else self._flights.stats()

    def close(self) -> None:
        """End the threads; the batcher was aborted."""
        self._aside.shutdown(wait=True, cancel_futures=True)
        for thread in self._decoders:
            if thread.is_alive():
                thread.join(timeout=30)
        self._helpers.shutdown(wait=True)

    def _begin(self, job: Job, item: EncodeItem, gpu: GpuLoop) -> None:
        """Admit the item and have it decoded, or fail it."""
        try:
            self._batcher.admit(job)
        except EncoderPoolError as error:
            job.fail(error)
        else:
            self._batcher.decode_later(job, lambda: self._decode(job, item, gpu))

    def _decode_for_ever(self) -> None:
        while (decode := self._batcher.next_decode()) is not None:
            with self._decoding:
                self._num_decoding += 1
                is_quiet = self._num_decoding <= len(self._decoders) // 2  # as many others may help
            try:
                with helped_by(self._helpers if is_quiet else None):
                    decode()
            finally:
                with self._decoding:
                    self._num_decoding -= 1

    def _decode(self, job: Job, item: EncodeItem, gpu: GpuLoop) -> None:
        started_s, waited_s, num_pushed = self._now_s(), 0.0, 0
        if job.deadline_s is not None and started_s >= job.deadline_s:
            job.fail(DeadlineError("its deadline passed before it was decoded"))
            return
        promised = item.shape.grids
        try:
            for part in gpu.prepare(item.encoded.tobytes()):  # an image in one, a clip in several
                grids = tuple(segment.shape.grid for segment in part)
                if grids != promised[num_pushed : num_pushed + len(grids)]:
                    raise EncodeError(f"decoded to segments {grids}, its header promised {promised[num_pushed:]}")
                pushed_s = self._now_s()
                job.timings_ms["decode"] = (pushed_s - started_s - waited_s) * 1e3
                self._batcher.push(job, part, first=num_pushed, num_segments=len(promised))
                if job.settled:  # nobody waits for the rest of a clip
                    return
                waited_s += self._now_s() - pushed_s
                num_pushed += len(part)
            if num_pushed < len(promised):
                raise EncodeError(f"decoded to {num_pushed} segments, its header promised {len(promised)}")
        except EncoderPoolError as error:
            job.fail(error)
        except Exception as error:  # edge of a thread: the item must settle whatever happened
            logger.exception("could not prepare an item of %d bytes", item.encoded.nbytes)
            job.fail(EncodeError(f"could not be prepared: {type(error).__name__}: {error}"))

    def _settle(self, job: Job, lease_id: int, key: bytes | None = None) -> None:
        if key is not None and self._flights is not None:
            self._flights.leave(key, job)
        self._counts.settled(job)
        self._batcher.release(job)
        self._on_settled(lease_id)

    def _later(self, task: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the threads have ended: the worker is being closed, and keeps nothing
            self._aside.submit(task)
