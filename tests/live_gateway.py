"""A real gateway before a real router and real workers in this process: spans and faults are at hand, Ray is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

from fake_pool import FakePool, client
from fakes import FakeRunner, loader, until

from cluster.client import Client
from cluster.gateway.config import GatewayConfig
from cluster.gateway.dispatch import Dispatcher
from cluster.gateway.threaded import GatewayThread
from cluster.lifecycle.stats import PoolStats
from cluster.pool import EncoderPool
from encoder.config import EncoderConfig
from workers.config import WorkerConfig
from workers.messages import Beat, EncodeBatch, EncodeResult, WorkerState
from workers.worker import EncoderWorker


@dataclass(frozen=True, eq=False)
class LiveCall:
    """A call under way, with the one method of a `RayCall` that a gateway uses."""

    worker_id: str
    batch: EncodeBatch
    running: Future[EncodeResult]

    def when_done(self, then: Callable[[], object]) -> None:
        self.running.add_done_callback(lambda _: then())


class LivePool(FakePool):
    """Calls run in threads. The router belongs to the dispatcher's thread."""

    def __init__(self, workers: dict[str, EncoderWorker]) -> None:
        super().__init__("".join(workers))
        self.workers = workers
        self.answer = lambda worker_id, batch: self.workers[worker_id].encode(batch)
        self.threads = ThreadPoolExecutor(16)
        self.settled: list[tuple[str, tuple[int, ...]]] = []

    def start(self, worker_id: str, batch: EncodeBatch) -> Any:
        self.log.append((worker_id, len(batch.items)))
        running = self.threads.submit(self._run, worker_id, batch)
        return LiveCall(worker_id, batch, running)

    def _run(self, worker_id: str, batch: EncodeBatch) -> EncodeResult:
        result = self.answer(worker_id, batch)
        self.settled.append((worker_id, tuple(item.lease_id for item in batch.items)))
        return result

    def lease(self, ask: Any) -> Any:
        while self.settled:
            worker_id, lease_ids = self.settled.pop()
            incarnation = f"{worker_id}/{self.incarnations[worker_id]}"
            self.router.beat(
                Beat(worker_id=worker_id, incarnation=incarnation, state=WorkerState.READY, settled=lease_ids)
            )
        return self.router.lease(ask)

    def result(self, call: Any) -> EncodeResult:
        result: EncodeResult = call.running.result()
        return result

    def cancel(self, worker_id: str, call_id: str, numbers: Sequence[int] | None = None) -> None:
        super().cancel(worker_id, call_id, numbers)
        self.workers[worker_id].cancel(call_id, numbers)


@dataclass(frozen=True, kw_only=True)
class Live:
    """What a test holds."""

    gateway: GatewayThread
    pool: LivePool
    client: Client
    runners: list[FakeRunner]

    @property
    def dispatcher(self) -> Dispatcher:
        assert self.gateway.gateway is not None
        return self.gateway.gateway.door.backend()._dispatchers["fake"]

    @property
    def url(self) -> str:
        return self.gateway.url


@contextmanager
def live_gateway(names: str = "a", *, cache_bytes: int = 0, **settings: Any) -> Iterator[Live]:
    """A gateway with these settings before workers of these names; it lets itself be asked at once."""
    config = WorkerConfig.model_validate(
        {"encoder": EncoderConfig(model="fake"), "device": "cpu", "decode_threads": 1, "cache_bytes": cache_bytes}
    )
    with ExitStack() as stack:
        runners = [FakeRunner() for _ in names]
        workers = {
            name: EncoderWorker(config, name, load=loader(runner)) for name, runner in zip(names, runners, strict=True)
        }
        for worker in workers.values():
            worker.start()
            stack.callback(worker.close)
            worker.wait_started(20)
        pool = LivePool(workers)
        stack.callback(pool.threads.shutdown)
        its_client = client(pool)
        stats = PoolStats(num_workers=len(names), members=(), reports=())
        standing = SimpleNamespace(
            config=its_client.config, client_for=lambda model: its_client, stats=lambda: stats, metrics=lambda *more: ""
        )
        gateway = GatewayThread(cast(EncoderPool, standing), GatewayConfig(port=0, **settings))
        live = Live(gateway=stack.enter_context(gateway), pool=pool, client=its_client, runners=runners)
        until(lambda: live.dispatcher.success_s is not None)  # its probe is through, and comes between nothing
        yield live
