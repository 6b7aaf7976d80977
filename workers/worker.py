"""`EncoderWorker`: admits calls, decodes beside the GPU, answers many callers. A plain class; its actor is in actor.py.

The path of a call: `encode` admits its items, the decode pool turns bytes into segments, the GPU thread (gpu_loop.py)
packs waiting segments into replays, and the last segment of an item settles it.
"""

# Shapes: T output rows of a call, E width of a token.

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

import torch

from encoder.errors import (
    DeadlineError,
    EncodeError,
    EncoderPoolError,
    PoolClosedError,
    PoolSaturatedError,
    WorkerLostError,
    WorkerStartError,
)
from encoder.runner import EncoderRunner
from encoder.types import GraphKey
from workers import spans
from workers.batcher import Batcher
from workers.cache import CacheStats, EmbeddingCache
from workers.cache_keys import content_digest, embedding_key, runner_fingerprint
from workers.calls import Calls
from workers.config import WorkerConfig
from workers.flights import Flights
from workers.gpu_loop import GpuLoop
from workers.job import Job
from workers.messages import (
    EncodeBatch,
    EncodeItem,
    EncodeResult,
    ErrorNote,
    ItemResult,
    WorkerReport,
    WorkerState,
    WorkerStats,
)
from workers.metrics import Meter
from workers.priority import Priority
from workers.tracer import Tracer

logger = logging.getLogger(__name__)


class EncoderWorker:
    """One encoder on one device. Every method may come from any thread."""

    def __init__(
        self,
        config: WorkerConfig,
        worker_id: str,
        *,
        load: Callable[[WorkerConfig], EncoderRunner] | None = None,
        on_settled: Callable[[int], None] = lambda lease_id: None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_settled` hears the lease of every item that reached this worker, once, whatever became of it."""
        self.config = config
        self.worker_id = worker_id
        self.incarnation = f"{worker_id}/{uuid.uuid4().hex[:8]}"
        self._load = load or load_runner
        self._on_settled = on_settled
        self._now_s = now_s
        self._batcher = Batcher(
            max_queue_ms=config.max_queue_ms,
            max_queue_bytes=config.max_queue_bytes,
            max_ready_patches=config.max_ready_patches,
            batch_patience_s=config.batch_patience_s,
            now_s=now_s,
        )
        num_threads = config.decode_threads or min(16, max(2, os.cpu_count() or 2))
        self._decoders = [
            threading.Thread(target=self._decode_for_ever, name=f"decode-{number}", daemon=True)
            for number in range(num_threads)
        ]
        self._aside = ThreadPoolExecutor(1, thread_name_prefix="aside")  # for what no answer waits for
        self._gpu_thread = threading.Thread(target=self._main, name="gpu", daemon=True)
        self._gpu: GpuLoop | None = None  # once started
        self._fingerprint = b""  # of the encoder, once started
        self._flights: Flights | None = None  # with a cache
        if config.cache_bytes:
            self._flights = Flights(
                EmbeddingCache(config.cache_bytes), release=self._batcher.release, later=self._later, now_s=now_s
            )
        self._state = WorkerState.STARTING
        self._error: ErrorNote | None = None
        self._started = threading.Event()
        self._lock = threading.Lock()
        self._calls = Calls(now_s=now_s)
        self._num_items = self._num_failed = self._num_cached = 0
        self._meter = Meter(worker_id)
        self.tracer = Tracer()

    def start(self) -> None:
        """Begin loading on the GPU thread and return at once; `wait_started` and `report` tell what came of it."""
        self._gpu_thread.start()
        for thread in self._decoders:
            thread.start()

    def wait_started(self, timeout_s: float) -> WorkerState:
        """Wait until it is ready, or failed."""
        self._started.wait(timeout_s)
        return self._state

    def encode(self, batch: EncodeBatch) -> EncodeResult:
        """Encode a call's items and return once each is settled. An item fails alone.

        Raises:
            WorkerLostError: the worker has not started, or failed to.
        """
        gpu = self._gpu
        if gpu is None:
            raise WorkerLostError(f"{self.worker_id} is {self._state}")
        with spans.span("encpool.encode", batch.trace, worker=self.worker_id, items=len(batch.items)) as here:
            jobs = self._run(batch, gpu)
            for job in jobs:
                record_stages(job, here)
            self.tracer.note(jobs, batch.items)
            return self._answer(jobs, gpu.runner)

    def _run(self, batch: EncodeBatch, gpu: GpuLoop) -> list[Job]:
        """Jobs of a call's items, all of them settled."""
        jobs = [self._job(item, gpu, batch.priority) for item in batch.items]
        self._calls.open(batch, jobs)
        try:
            for job, item in zip(jobs, batch.items, strict=True):
                if not job.settled:
                    self._enter(job, item, gpu)
            for job in jobs:
                job.wait()
        finally:
            self._calls.close(batch)
        return jobs

    def cancel(self, call_id: str, numbers: Sequence[int] | None = None) -> None:
        """Drop what a call, or only these items of it, still has in the queue; the items fail."""
        self._calls.cancel(call_id, numbers)

    def clients(self) -> list[str]:
        """Whose calls are here, or were when they were given up."""
        return self._calls.clients()

    def give_up(self, silent: Collection[str]) -> None:
        """Of `clients()`, these are gone: drop what is queued here of them. The others live."""
        self._calls.give_up(silent)

    def apply_graphs(self, keys: Sequence[GraphKey]) -> None:
        """Hold these graphs from now on; returns at once. Captures and drops happen between replays, one at a time.

        `report().graph_change` tells how it stands, and which keys could not be captured.

        Raises:
            WorkerLostError: the worker has not started, or failed to.
        """
        if self._gpu is None:
            raise WorkerLostError(f"{self.worker_id} is {self._state}")
        self._gpu.changer.ask(keys)

    def find(self, contents: Sequence[bytes], scope: str = "") -> EncodeResult:
        """What the cache holds of these content digests; items that are not `cached` are not there. Encodes nothing.

        Raises WorkerLostError as `encode` does.
        """
        gpu = self._gpu
        if gpu is None:
            raise WorkerLostError(f"{self.worker_id} is {self._state}")
        jobs = []
        for content in contents:
            key = embedding_key(content, fingerprint=self._fingerprint, scope=scope)
            found = None if self._flights is None else self._flights.cache.find(key)
            job = Job(cost_ms=0.0)
            if found is not None:
                job.cached = True
                job.complete([found[0]])
            jobs.append(job)
        return self._answer(jobs, gpu.runner)

    def report(self) -> WorkerReport:
        """How it stands; answers at once, whatever the GPU does."""
        gpu = self._gpu
        return WorkerReport(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            state=self._state,
            error=self._error,
            device="" if gpu is None else str(gpu.runner.device),
            gpu_uuid=None if gpu is None else gpu_uuid(gpu.runner.device),
            host=socket.gethostname(),
            pid=os.getpid(),
            encoder="" if gpu is None else gpu.runner.encoder_id,
            model=self.config.encoder.model,
            graphs=() if gpu is None else gpu.graphs,
            eager_ms_per_patch=0.0 if gpu is None else gpu.holdings.eager.ms_per_patch,
            eager_base_ms=0.0 if gpu is None else gpu.holdings.eager.base_ms,
            known_graphs=() if gpu is None else gpu.holdings.known,
            graph_bytes=0 if gpu is None else gpu.holdings.used_bytes,
            graph_limit_bytes=0 if gpu is None else gpu.holdings.limit_bytes,
            capture_ms=0.0 if gpu is None else gpu.changer.capture_ms(),
            failed_graphs=() if gpu is None else gpu.failed_graphs,
            graph_change=None if gpu is None else gpu.changer.last,
            cost_error=None if gpu is None else gpu.runner.cost_error,
            max_queue_ms=self.config.max_queue_ms,
            max_queue_bytes=self.config.max_queue_bytes,
            backlog_ms=self._batcher.backlog_ms,
            backlog_bytes=self._batcher.backlog_bytes,
            num_waiting=self._batcher.num_waiting,
            stats=self._stats(),
            cache_tokens=0 if gpu is None else self.config.cache_bytes // row_bytes(gpu.runner),
        )

    def drain(self, timeout_s: float) -> bool:
        """Take nothing more and wait for what is here; whether all of it was settled in time."""
        if self._state is WorkerState.READY:
            self._state = WorkerState.DRAINING
        self._batcher.close()
        return self._batcher.wait_empty(timeout_s)

    def close(self) -> None:
        """Fail what is left and end the threads."""
        if self._state is not WorkerState.FAILED:
            self._state = WorkerState.CLOSED
        self._batcher.abort(WorkerLostError(f"{self.worker_id} was closed"))
        self._aside.shutdown(wait=True, cancel_futures=True)
        for thread in (*self._decoders, self._gpu_thread):
            if thread.is_alive():
                thread.join(timeout=30)

    # --- an item's way -------------------------------------------------------------------------------------------

    def _job(self, item: EncodeItem, gpu: GpuLoop, priority: Priority) -> Job:
        job = Job(
            cost_ms=gpu.costs.quote(item.shape.grids).cost_ms,
            deadline_s=None if item.timeout_s is None else self._now_s() + item.timeout_s,
            num_bytes=item.encoded.nbytes,
            priority=priority,
        )
        job.on_settled = lambda job: self._settle(job, item.lease_id)
        return job

    def _enter(self, job: Job, item: EncodeItem, gpu: GpuLoop) -> None:
        """Answer the item from the cache, let it wait for an identical one, or begin its work."""
        if (
            self._flights is None or item.scope is None or self._state is not WorkerState.READY
        ):  # what is on its way out refuses
            self._begin(job, item, gpu)
            return
        started_s = self._now_s()
        key = embedding_key(content_digest(item.encoded.data), fingerprint=self._fingerprint, scope=item.scope)
        job.on_settled = lambda job: self._settle(job, item.lease_id, key)
        job.timings_ms["cache"] = (self._now_s() - started_s) * 1e3
        self._flights.enter(key, item.shape, job, lambda work: self._begin(work, item, gpu))

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
            decode()

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
        if not isinstance(job.error, PoolSaturatedError | PoolClosedError):  # those it never took on board
            with self._lock:
                self._num_items += 1
                self._num_failed += job.error is not None
                self._num_cached += job.cached and job.error is None
            for stage, stage_ms in job.timings_ms.items():
                self._meter.observe("encpool_stage_seconds", stage, value=stage_ms / 1e3)
        self._batcher.release(job)
        self._on_settled(lease_id)

    def _later(self, task: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the threads have ended: the worker is being closed, and keeps nothing
            self._aside.submit(task)

    def _answer(self, jobs: Sequence[Job], runner: EncoderRunner) -> EncodeResult:
        """Tokens of all jobs in one array, and what became of each."""
        started_s = self._now_s()
        blocks = [block for job in jobs for block in job.outputs if block is not None]
        out_TE = torch.cat(blocks) if blocks else torch.empty(0, runner.adapter.hidden_size, dtype=runner.dtype)
        self._meter.observe("encpool_stage_seconds", "copy_out", value=self._now_s() - started_s)
        self._meter.add("encpool_tokens_total", amount=len(out_TE))
        words = out_TE.view(torch.uint16) if runner.dtype == torch.bfloat16 else out_TE
        return EncodeResult(
            worker_id=self.worker_id,
            dtype=str(runner.dtype).removeprefix("torch."),
            tokens_TE=words.numpy(),
            items=tuple(
                ItemResult(
                    num_tokens=sum(len(block) for block in job.outputs if block is not None),
                    graphs=tuple(job.graphs),
                    misses=tuple(job.misses),
                    timings_ms=job.timings_ms,
                    cached=job.cached and job.error is None,
                    error=None if job.error is None else ErrorNote.of(job.error),
                )
                for job in jobs
            ),
        )

    def _stats(self) -> WorkerStats:
        if self._gpu is None:
            return WorkerStats()
        stats = self._gpu.stats
        return WorkerStats(
            num_items=self._num_items,
            num_failed=self._num_failed,
            num_replays=sum(list(stats.replays.values())),
            num_eager_runs=stats.eager_runs,
            segment_hits=stats.hits,
            segment_misses={str(reason): count for reason, count in list(stats.misses.items())},
            useful_patches=stats.useful_patches,
            run_patches=stats.replayed_patches,
            num_cached=self._num_cached,
            cache=CacheStats() if self._flights is None else self._flights.stats(),
            graph_uses={str(key): replace(use) for key, use in list(stats.uses.items())},
            capture_s=self._gpu.capture_s,
            samples=self._meter.samples(),
        )

    # --- the GPU thread ------------------------------------------------------------------------------------------

    def _main(self) -> None:
        started_s = time.monotonic()
        try:
            gpu = GpuLoop(self.config, self._batcher, self._load(self.config), now_s=self._now_s)
            gpu.start_up()
        except Exception as error:  # edge of a thread: the report says why
            note = ErrorNote.of(error, otherwise=WorkerStartError)
            trace = None if isinstance(error, EncoderPoolError) else error  # a user's mistake needs none
            logger.error("%s could not start: %s: %s", self.worker_id, note.name, note.message, exc_info=trace)
            self._give_up(note)
            return
        if self._flights is not None:
            self._fingerprint = runner_fingerprint(gpu.runner)
        self._gpu = gpu
        if self._state is WorkerState.STARTING:  # not closed meanwhile
            self._state = WorkerState.READY
        self._started.set()
        logger.info(
            "%s ready on %s after %.1f s: %s, %d graphs",
            self.worker_id, gpu.runner.device, time.monotonic() - started_s, gpu.runner.encoder_id, len(gpu.graphs),
        )  # fmt: skip
        try:
            gpu.run()
        except Exception as error:  # edge of a thread: the device is lost, or a bug of ours
            logger.exception("%s cannot go on", self.worker_id)
            self._give_up(ErrorNote.of(error, otherwise=WorkerLostError))

    def _give_up(self, note: ErrorNote) -> None:
        self._error, self._state = note, WorkerState.FAILED
        self._started.set()
        self._batcher.abort(WorkerLostError(f"{self.worker_id} failed: {note.message}"))


def load_runner(config: WorkerConfig) -> EncoderRunner:
    """The runner that a configuration asks for, on this process's device."""
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise WorkerStartError("worker.device is cuda and this process sees no GPU; use cpu or auto")
    if device == "cuda" and config.gpu_memory_share < 1:
        torch.cuda.set_per_process_memory_fraction(config.gpu_memory_share, 0)
    return EncoderRunner.from_config(config.encoder, "cuda:0" if device == "cuda" else "cpu")


def record_stages(job: Job, trace: str) -> None:
    """Spans of an item's stages, of one that ran here and now."""
    if not trace or job.started_s is None:
        return
    decode_ms, wait_ms = job.timings_ms.get("decode", 0.0), job.timings_ms.get("wait", 0.0)
    spans.past("decode", trace, job.started_s - (wait_ms + decode_ms) / 1e3, decode_ms)
    spans.past("wait", trace, job.started_s - wait_ms / 1e3, wait_ms)
    spans.past("replay", trace, job.started_s, job.timings_ms.get("replay", 0.0), graphs=" + ".join(job.graphs))


def row_bytes(runner: EncoderRunner) -> int:
    """Bytes of one output token."""
    return runner.adapter.hidden_size * runner.dtype.itemsize


def gpu_uuid(device: torch.device) -> str | None:
    """Identity of the GPU, whatever number this process knows it by."""
    if device.type != "cuda":
        return None
    return str(torch.cuda.get_device_properties(device).uuid)
