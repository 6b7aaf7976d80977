"""`EncoderWorker`: its life, the calls it takes and the report it gives. A plain class; its actor is in actor.py.

The path of a call: `encode` enters its items (intake.py), which admits them and turns bytes into segments in threads;
the GPU thread (gpu_loop.py) packs waiting segments into replays, the last segment of an item settles it, and when all
are settled the call is answered (answers.py).
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import numpy as np

from encoder.errors import EncoderPoolError, WorkerLostError, WorkerStartError
from encoder.runner import EncoderRunner
from encoder.types import GraphKey
from workers import spans
from workers.answers import answer, record_stages, row_bytes
from workers.batcher import Batcher
from workers.calls import Calls
from workers.config import WorkerConfig
from workers.counts import Counts
from workers.device import gpu_uuid, load_runner
from workers.gpu_loop import GpuLoop
from workers.intake import Intake
from workers.job import Job
from workers.messages import EncodeBatch, EncodeResult, ErrorNote, WorkerReport, WorkerState
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
        self._now_s = now_s
        self._batcher = Batcher(
            max_queue_ms=config.max_queue_ms,
            max_queue_bytes=config.max_queue_bytes,
            max_ready_patches=config.max_ready_patches,
            batch_patience_s=config.batch_patience_s,
            now_s=now_s,
        )
        self._counts = Counts(worker_id)
        self._intake = Intake(config, self._batcher, self._counts, on_settled=on_settled, now_s=now_s)
        self._gpu_thread = threading.Thread(target=self._main, name="gpu", daemon=True)
        self._gpu: GpuLoop | None = None  # once started
        self._state = WorkerState.STARTING
        self._error: ErrorNote | None = None
        self._started = threading.Event()
        self._calls = Calls(now_s=now_s)
        self.tracer = Tracer()

    def start(self) -> None:
        """Begin loading on the GPU thread and return at once; `wait_started` and `report` tell what came of it."""
        self._gpu_thread.start()
        self._intake.start()

    def wait_started(self, timeout_s: float) -> WorkerState:
        """Wait until it is ready, or failed."""
        self._started.wait(timeout_s)
        return self._state

    def encode(self, batch: EncodeBatch, room: np.ndarray | None = None) -> EncodeResult:
        """Encode a call's items and return once each is settled. An item fails alone.

        Args:
            room: bytes to leave the tokens in, if they fit.

        Raises:
            WorkerLostError: the worker has not started, or failed to.
        """
        gpu = self._started_gpu()
        with spans.SharedSpan("encpool.encode", batch.traces, worker=self.worker_id) as here:
            jobs = self._run(batch, gpu)
            for job, trace in zip(jobs, here, strict=False):  # none at all where nobody traces
                record_stages(job, trace)
            self.tracer.note(jobs, batch.items, gpu.runner.adapter.encoder)
            return self._answer(jobs, gpu.runner, room)

    def refuse(self, batch: EncodeBatch, error: EncoderPoolError) -> EncodeResult:
        """Take nothing of a call on board: each of its items fails with this error. Raises as `encode` does."""
        gpu = self._started_gpu()
        jobs = [self._intake.job(item, gpu, batch.priority) for item in batch.items]
        for job in jobs:
            job.fail(error)
        return self._answer(jobs, gpu.runner)

    def _run(self, batch: EncodeBatch, gpu: GpuLoop) -> list[Job]:
        """Jobs of a call's items, all of them settled."""
        jobs = [self._intake.job(item, gpu, batch.priority) for item in batch.items]
        self._calls.open(batch, jobs)
        try:
            for job, item in zip(jobs, batch.items, strict=True):
                if not job.settled:  # what is on its way out refuses, even what it has kept
                    self._intake.enter(job, item, gpu, use_cache=self._state is WorkerState.READY)
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
        self._started_gpu().ask(keys)

    def find(self, contents: Sequence[bytes], scope: str = "") -> EncodeResult:
        """What the cache holds of these content digests; items that are not `cached` are not there. Encodes nothing.

        Raises WorkerLostError as `encode` does.
        """
        gpu = self._started_gpu()
        return self._answer(self._intake.find(contents, scope), gpu.runner)

    def _started_gpu(self) -> GpuLoop:
        if self._gpu is None:
            raise WorkerLostError(f"{self.worker_id} is {self._state}")
        return self._gpu

    def _answer(self, jobs: Sequence[Job], runner: EncoderRunner, room: np.ndarray | None = None) -> EncodeResult:
        started_s = self._now_s()
        result = answer(self.worker_id, jobs, runner, room, shared=self.config.cache_bytes > 0)
        self._counts.answered(len(result.tokens_TE), self._now_s() - started_s)
        return result

    def report(self) -> WorkerReport:
        """How it stands; answers at once, whatever the GPU does."""
        report = WorkerReport(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            state=self._state,
            error=self._error,
            host=socket.gethostname(),
            pid=os.getpid(),
            model=self.config.encoder.model,
            max_queue_ms=self.config.max_queue_ms,
            max_queue_bytes=self.config.max_queue_bytes,
            backlog_ms=self._batcher.backlog_ms,
            backlog_bytes=self._batcher.backlog_bytes,
            num_waiting=self._batcher.num_waiting,
            eager_measured=False,
        )
        gpu = self._gpu
        if gpu is None:
            return report
        holdings = gpu.holdings
        return replace(
            report,
            device=str(gpu.runner.device),
            gpu_uuid=gpu_uuid(gpu.runner.device),
            encoder=gpu.runner.encoder_id,
            graphs=holdings.graphs,
            eager_ms_per_patch=holdings.eager.ms_per_patch,
            eager_base_ms=holdings.eager.base_ms,
            eager_measured=holdings.eager.measured,
            known_graphs=holdings.known,
            graph_bytes=holdings.used_bytes,
            graph_limit_bytes=holdings.limit_bytes,
            capture_ms=gpu.changer.capture_ms(),
            failed_graphs=gpu.failed_graphs,
            graph_change=gpu.changer.last,
            cost_error=gpu.runner.cost_error,
            stats=self._counts.stats(gpu, self._intake.cache_stats()),
            cache_tokens=self.config.cache_bytes // row_bytes(gpu.runner),
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
        self._intake.close()
        if self._gpu_thread.is_alive():
            self._gpu_thread.join(timeout=30)

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
        self._intake.know(gpu.runner)
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
