"""Several encoders in one pool, in one process: each item is encoded by a worker of the model that was asked for."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes import picture

from cluster.client import Client, clients_of
from cluster.config import PoolConfig
from cluster.routing.leases import Answer, Ask
from cluster.routing.router import Router
from encoder.adapters.registry import load_adapter
from encoder.media import decode_image
from encoder.runner import EncoderRunner
from workers.messages import EncodeBatch, EncodeResult
from workers.metrics import Meter
from workers.worker import EncoderWorker

MODELS = ("tiny-minicpmv-2.6", "tiny-minicpmv-2.5", "tiny-siglip")
CONFIG = PoolConfig.model_validate(
    {
        "worker": {"device": "cpu", "torch_threads": 1},
        "groups": [
            {"name": f"group_{number}", "num_workers": 1, "worker": {"encoder": {"model": model}}}
            for number, model in enumerate(MODELS)
        ],
    }
)


class Direct:
    """A transport to workers in this process."""

    def __init__(self, router: Router, workers: dict[str, EncoderWorker]) -> None:
        self._router, self._workers = router, workers
        self._lock = threading.Lock()  # the router belongs to one thread at a time
        self.threads = ThreadPoolExecutor(8)

    def lease(self, ask: Ask) -> Answer:
        with self._lock:
            return self._router.lease(ask)

    def start(self, worker_id: str, batch: EncodeBatch) -> Future[EncodeResult]:
        return self.threads.submit(self._workers[worker_id].encode, batch)

    def wait(self, calls: Sequence[Future[EncodeResult]], timeout_s: float) -> list[Any]:
        return list(wait(calls, timeout=timeout_s, return_when=FIRST_COMPLETED)[0])

    def result(self, call: Future[EncodeResult]) -> EncodeResult:
        return call.result()

    def cancel(self, worker_id: str, call_id: str, numbers: Sequence[int] | None = None) -> None:
        self._workers[worker_id].cancel(call_id, numbers)

    def suspect(self, incarnation: str) -> None:
        raise AssertionError(f"{incarnation} lives")

    def release(self, lease_ids: Sequence[int]) -> None:
        with self._lock:
            self._router.release(lease_ids)

    def hello(self, client: str) -> None:
        with self._lock:
            self._router.hello(client)

    def quarantine(self, left_s: dict[bytes, float]) -> None:
        raise AssertionError("nothing is poison")


@pytest.fixture
def clients() -> Iterator[dict[str, Client]]:
    first, *others = MODELS
    router = Router(
        load_adapter(CONFIG.encoders[first]),
        others={model: load_adapter(CONFIG.encoders[model]) for model in others},
        lease_timeout_s=60,
        silent_timeout_s=1e9,
    )
    workers = {}
    for group in CONFIG.worker_groups:
        worker = workers[f"{group.name}-0"] = EncoderWorker(group.worker, f"{group.name}-0")
        worker.start()
    for worker in workers.values():
        worker.wait_started(60)
        router.register(worker.report())
    transport = Direct(router, workers)
    yield clients_of(CONFIG, transport, num_workers=lambda: len(workers))
    transport.threads.shutdown()
    for worker in workers.values():
        worker.close()


def test_what_a_client_of_any_model_counts_is_exported() -> None:
    told: list[Meter] = []
    transport: Any = SimpleNamespace(quarantine=None)
    clients = clients_of(CONFIG, transport, num_workers=lambda: 0, export=told.append)
    for client in clients.values():
        client.export()
    assert told == [clients[MODELS[0]].meter] * len(MODELS)


@pytest.mark.timeout(120)
def test_each_item_gets_the_tokens_of_the_model_asked_for(clients: dict[str, Client]) -> None:
    pictures = [picture(10 * number, width=60 + 10 * number, height=48) for number in range(4)]
    for number, model in enumerate(MODELS):
        runner = EncoderRunner.from_config(CONFIG.encoders[model].model_copy(update={"graphs": False}), "cpu")
        for data, outcome in zip(pictures, clients[model].encode_many(pictures), strict=True):
            assert outcome.embedding is not None, outcome.error
            assert outcome.embedding.worker == f"group_{number}-0"
            image = decode_image(data, max_pixels=10**6, max_bytes=10**6)
            expected = torch.cat(runner.encode(runner.adapter.prepare(image)))
            torch.testing.assert_close(outcome.embedding.tokens, expected, rtol=1e-4, atol=1e-5)
