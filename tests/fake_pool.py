"""A real router, and workers that answer by a script: what a client meets, without Ray."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from fakes import HIDDEN, Clock, fake_adapter, graph, picture, report

from cluster.client import Client
from cluster.config import PoolConfig
from cluster.routing.leases import Answer, Ask
from cluster.routing.router import Router
from cluster.streams import leasing
from cluster.streams.transport import WorkerGone
from encoder.config import EncoderConfig
from workers.config import WorkerConfig
from workers.messages import Beat, EncodeBatch, EncodeResult, ErrorNote, ItemResult, WorkerState

Behaviour = Callable[[str, EncodeBatch], EncodeResult]


class FakePool:
    """A real router, and workers that answer each call when the client waits for it."""

    def __init__(self, names: str = "ab", *, max_queue_ms: float = 1e6) -> None:
        self.clock = Clock()
        self.router = Router(
            fake_adapter(),
            lease_timeout_s=60,
            silent_timeout_s=1e9,
            now_s=self.clock,
            rng=random.Random(0),
        )
        self.max_queue_ms = max_queue_ms
        self.incarnations = dict.fromkeys(names, 0)
        self.calls: dict[int, tuple[str, int, EncodeBatch]] = {}
        self.log: list[tuple[str, int]] = []  # worker and number of items of each call
        self.num_asked = 0  # items, each time for a lease
        self.cancelled: list[str | int] = []
        self.max_calls_each = 0
        self.num_lost_calls = 0  # that were under way to a worker when it restarted
        self.newest_first = True  # the worst case for order
        self.answer: Behaviour = encoded
        self._numbers = itertools.count()
        for name in names:
            self.restart(name)

    def restart(self, name: str) -> None:
        self.incarnations[name] += 1
        self.register(name)

    def register(self, name: str) -> None:
        incarnation = f"{name}/{self.incarnations[name]}"
        self.router.register(report(name, incarnation=incarnation, graphs=(graph(),), max_queue_ms=self.max_queue_ms))

    def lease(self, ask: Ask) -> Answer:
        self.num_asked += len(ask.which)
        return self.router.lease(ask)

    def start(self, worker_id: str, batch: EncodeBatch) -> Any:
        number = next(self._numbers)
        self.calls[number] = (worker_id, self.incarnations[worker_id], batch)
        self.log.append((worker_id, len(batch.items)))
        each = [name for name, _, _ in self.calls.values()]
        self.max_calls_each = max(self.max_calls_each, *(each.count(name) for name in each))
        return number

    def wait(self, calls: Sequence[Any], timeout_s: float) -> list[Any]:
        return list(calls[-1:] if self.newest_first else calls[:1])

    def result(self, call: Any) -> EncodeResult:
        worker_id, incarnation, batch = self.calls.pop(call)
        if incarnation != self.incarnations[worker_id]:
            self.num_lost_calls += 1
            raise WorkerGone("ActorDiedError")
        result = self.answer(worker_id, batch)
        self.router.beat(
            Beat(
                worker_id=worker_id,
                incarnation=f"{worker_id}/{incarnation}",
                state=WorkerState.READY,
                settled=tuple(item.lease_id for item in batch.items),
            )
        )
        return result

    def cancel(self, worker_id: str, call_id: str, numbers: Sequence[int] | None = None) -> None:
        self.cancelled.extend([call_id] if numbers is None else numbers)

    def suspect(self, incarnation: str) -> None:
        self.router.suspect(incarnation)

    def release(self, lease_ids: Sequence[int]) -> None:
        self.router.release(lease_ids)

    def hello(self, client: str) -> None:
        pass  # from another thread: the router here belongs to one

    def quarantine(self, left_s: dict[bytes, float]) -> None:
        self.router.quarantine(left_s)

    def in_flight_ms(self) -> float:
        return sum(member.in_flight_ms for member in self.router.members())


def encoded(worker_id: str, batch: EncodeBatch, *, failing: dict[int, ErrorNote] | None = None) -> EncodeResult:
    """Each item's tokens hold the number of bytes that it came as."""
    answers, rows = [], []
    for number, item in enumerate(batch.items):
        error = (failing or {}).get(number)
        num_tokens = 0 if error else item.shape.num_tokens
        rows.append(np.full((num_tokens, HIDDEN), item.encoded.nbytes, np.float32))
        answers.append(
            ItemResult(num_tokens=num_tokens, graphs=("g",), misses=(), timings_ms={"replay": 1.0}, error=error)
        )
    return EncodeResult(worker_id=worker_id, dtype="float32", tokens_TE=np.concatenate(rows), items=tuple(answers))


def client(pool: FakePool, **changes: Any) -> Client:
    worker = WorkerConfig(encoder=EncoderConfig(model="fake", max_bytes=10_000))
    config = PoolConfig(num_workers=2, worker=worker, **{"items_per_call": 4, "calls_per_worker": 2, **changes})
    return Client(config, fake_adapter(), pool, num_workers=lambda: len(pool.incarnations))


@contextmanager
def retrying_soon() -> Iterator[None]:
    """Clients ask again after milliseconds, not tens of them: for tests that meet hundreds of refusals."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leasing, "MIN_RETRY_S", 0.001)
        patch.setattr(leasing, "TRIAL_RETRY_S", 0.002)
        yield


PICTURES = [picture(1, width=50 + 60 * number, height=40 + number) for number in range(30)]
