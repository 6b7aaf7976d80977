"""`EncoderWorker` as a Ray actor: process settings, concurrency groups, reports to the router. No logic of its own."""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError

from encoder.travel import MESSAGE_BYTES, from_bytes, to_bytes
from encoder.types import GraphKey
from workers.config import WorkerConfig
from workers.messages import Beat, EncodeBatch, EncodeResult, Heard, WorkerReport, WorkerState
from workers.metrics import samples_of
from workers.priority import Priority
from workers.process import FreedMemory, keep_freed_memory, set_up_process
from workers.ray_metrics import RayExporter
from workers.slabs import SlabMaps, encode_lent

logger = logging.getLogger(__name__)

GATHER_S = 0.005  # how long a report waits for more settled leases to carry
ROUTER_TIMEOUT_S = 10.0
START_RETRY_S = 10.0  # until a worker that could not start tries again
SWITCH_INTERVAL_S = 0.001


class EncoderWorkerActor:
    """Registers with the router once it can encode, or cannot; beats from then on. Restarted, it does so again."""

    def __init__(self, worker_id: str, config: WorkerConfig, router_name: str, namespace: str) -> None:
        """`router_name` is the actor name of the pool's `cluster.routing.router.RouterActor`.

        A name, not a handle: a restart must not depend on a handle that its creator may have dropped.
        """
        set_up_process("encpool-worker", on_gpu=config.device != "cpu")
        if config.device == "cpu":
            # Threads that wait by spinning take the core that another worker computes on: measured 9 times slower.
            os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        # Decoding threads would keep the GPU's from Python's lock for 5 ms at a time.
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        keep_freed_memory()
        import torch  # not at the top: Ray imports this module before the line above

        from workers.worker import EncoderWorker

        if config.torch_threads is not None:
            torch.set_num_threads(config.torch_threads)
        self._router = ray.get_actor(router_name, namespace=namespace)
        self._exporter = RayExporter()
        self._interval_s = config.report_interval_s
        self._settled: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._slabs = SlabMaps()
        self._worker = EncoderWorker(config, worker_id, on_settled=self._settled.put)
        self._worker.start()
        threading.Thread(target=self._report, name="reporter", daemon=True).start()

    @ray.method(concurrency_group="batch")  # interactive calls name theirs
    def encode(self, call: bytes | EncodeBatch) -> bytes | EncodeResult:
        """See `EncoderWorker.encode`. Both ways, what carries no large arrays travels as bytes."""
        batch: EncodeBatch = from_bytes(call) if isinstance(call, bytes) else call
        result = encode_lent(self._worker, self._slabs, batch)
        return to_bytes(result) if result.tokens_TE.nbytes <= MESSAGE_BYTES else result

    @ray.method(concurrency_group="ctl")
    def cancel(self, call_id: str, numbers: Sequence[int] | None = None) -> None:
        """See `EncoderWorker.cancel`."""
        self._worker.cancel(call_id, numbers)

    @ray.method(concurrency_group="ctl")
    def apply_graphs(self, keys: tuple[GraphKey, ...]) -> None:
        """See `EncoderWorker.apply_graphs`."""
        self._worker.apply_graphs(keys)

    @ray.method(concurrency_group="ctl")
    def find(self, contents: Sequence[bytes], scope: str = "") -> EncodeResult:
        """See `EncoderWorker.find`."""
        return self._worker.find(contents, scope)

    @ray.method(concurrency_group="ctl")
    def report(self) -> WorkerReport:
        """See `EncoderWorker.report`."""
        return self._worker.report()

    @ray.method(concurrency_group="ctl")
    def ping(self) -> None:
        """Answers once the actor was placed and its process is up."""

    @ray.method(concurrency_group="ctl")
    def drain(self, timeout_s: float) -> bool:
        """See `EncoderWorker.drain`."""
        return self._worker.drain(timeout_s)

    def _report(self) -> None:
        try:
            self._report_for_ever()
        except Exception:  # edge of a thread: a worker that nobody hears of again would get no leases, for ever
            logger.exception("the reporter broke: the process ends, Ray starts another")
            os._exit(1)

    def _report_for_ever(self) -> None:
        registered: object = None
        was_ready = False
        settled: list[int] = []
        looked_s = time.monotonic()  # after clients that were killed
        freed = FreedMemory()
        while self._worker.wait_started(self._interval_s) is WorkerState.STARTING:
            pass
        while True:
            report = self._worker.report()
            self._exporter.export(partial(samples_of, report))
            self._slabs.sweep()
            freed.look(report.stats.num_items)
            try:
                if registered != (report.state, report.graphs):
                    ray.get(self._router.register.remote(report), timeout=ROUTER_TIMEOUT_S)
                    registered = (report.state, report.graphs)
                beat = Beat(
                    worker_id=report.worker_id,
                    incarnation=report.incarnation,
                    state=report.state,
                    settled=tuple(settled),
                    traced=self._worker.tracer.take(),
                )
                answer: Any = ray.get(self._router.hear.remote(to_bytes(beat)), timeout=ROUTER_TIMEOUT_S)
                heard = Heard(answer)
                self._worker.tracer.is_on = heard is Heard.TRACING
                if heard is Heard.UNKNOWN:
                    registered = None
                settled.clear()
                if time.monotonic() - looked_s >= self._interval_s:
                    looked_s = time.monotonic()
                    self._give_up_silent_clients()
            except RayError as error:  # it restarts; what is settled is told to the next one
                logger.warning("could not report to the router: %s", type(error).__name__)
                registered = None
                time.sleep(self._interval_s)
            was_ready = was_ready or report.state is WorkerState.READY
            if report.state is WorkerState.FAILED:
                # A pool that starts ends us first; later, what kept a restart from loading may pass.
                time.sleep(0 if was_ready else START_RETRY_S)
                logger.error("%s failed: the process ends, Ray starts another", report.worker_id)
                os._exit(1)
            settled += self._gather()

    def _give_up_silent_clients(self) -> None:
        clients = self._worker.clients()
        if clients:
            silent: list[str] = ray.get(self._router.silent_clients.remote(clients), timeout=ROUTER_TIMEOUT_S)
            self._worker.give_up(silent)

    def _gather(self) -> list[int]:
        """Leases settled since the last time: at once when there are some, else after the longest silence."""
        try:
            settled = [self._settled.get(timeout=self._interval_s)]
        except queue.Empty:
            return []
        time.sleep(GATHER_S)
        while not self._settled.empty():
            settled.append(self._settled.get())
        return settled


def worker_actor_class(config: WorkerConfig) -> Any:
    """The Ray actor class, with room for as many calls of each priority at once as the configuration says."""
    remote: Any = ray.remote  # its type hints lack concurrency groups
    return remote(
        max_restarts=-1,
        max_task_retries=0,  # the client retries, on another worker at once
        concurrency_groups={
            **{str(priority): config.encode_calls for priority in Priority},
            "ctl": 2,
        },
    )(EncoderWorkerActor)
