"""Decisions a second: in process beside a bare loop, and through the actor beside a method that returns at once."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

from cluster.benchmark.simulated import BATCH, asks, simulated_router, simulated_workers
from cluster.routing.leases import Answer, Ask
from cluster.routing.router import Router
from cluster.routing.worker_view import WorkerView
from encoder.travel import from_bytes, to_bytes

NUM_CHANGES = 10  # workers that go and come back
KEPT_CALLS = 4  # calls in flight; older ones are settled between the timed ones


@dataclass(frozen=True, kw_only=True)
class Rate:
    """Decisions a second with so many workers."""

    num_workers: int
    items_per_s: float  # leases given, with what the router notes of each
    bare_items_per_s: float  # a loop that draws two workers and takes the one with less in flight
    first_call_ms: float  # CPU time of the first call after a worker came or went


def measure_rate(num_workers: int, *, num_calls: int, repeats: int = 5) -> Rate:
    """Best of some repeats, the router and the bare loop in turn."""
    rng = random.Random(0)
    router, calls = simulated_router(num_workers, rng), asks(num_calls, rng)
    views = list(router.roster.views.values())
    for _ in range(math.ceil(64 * num_workers / (BATCH * num_calls))):  # until the workers are priced
        _lease_all(router, calls)
    ours = bare = math.inf
    for _ in range(repeats):
        ours = min(ours, _lease_all(router, calls))
        bare = min(bare, _bare_all(views, num_calls, rng))
    num_items = num_calls * BATCH
    return Rate(
        num_workers=num_workers,
        items_per_s=num_items / ours,
        bare_items_per_s=num_items / bare,
        first_call_ms=_first_call_ms(router, calls, num_workers),
    )


def _first_call_ms(router: Router, calls: Sequence[Ask], num_workers: int) -> float:
    """Median over workers that go and come back, with calls in between as there are in a pool."""
    taken_s = []
    for report in islice(simulated_workers(num_workers, random.Random(0)), NUM_CHANGES):
        for change in (partial(router.forget, report.worker_id), partial(router.register, report)):
            change()
            started_s = time.process_time()
            first = router.lease(calls[0]).first
            taken_s.append(time.process_time() - started_s)
            router.release(range(first, first + BATCH))
            _lease_all(router, calls)
    return statistics.median(taken_s) * 1e3


def _lease_all(router: Router, calls: Sequence[Ask]) -> float:
    taken_s, kept = 0.0, deque[int]()
    for ask in calls:
        started_s = time.perf_counter()
        first = router.lease(ask).first
        taken_s += time.perf_counter() - started_s
        kept.append(first)
        if len(kept) > KEPT_CALLS:
            router.release(range(first := kept.popleft(), first + BATCH))
    for first in kept:
        router.release(range(first, first + BATCH))
    return taken_s


def _bare_all(views: list[WorkerView], num_calls: int, rng: random.Random) -> float:
    taken_s = 0.0
    for _ in range(num_calls):
        chosen = []
        started_s = time.perf_counter()
        for _ in range(BATCH):
            one, other = rng.choice(views), rng.choice(views)
            worker = one if one.in_flight_ms <= other.in_flight_ms else other
            worker.in_flight_ms += 10.0
            chosen.append(worker)
        taken_s += time.perf_counter() - started_s
        for worker in chosen:
            worker.in_flight_ms -= 10.0
    return taken_s


class _BenchActor:
    """A router with simulated workers, asked as clients do, and a plain method that returns the last answer at once."""

    def __init__(self, num_workers: int) -> None:
        self._router = simulated_router(num_workers, random.Random(0))
        self._answers: deque[Answer] = deque([Answer(0, [])])

    def ask(self, ask: bytes) -> bytes:
        answer = self._router.lease(Ask._make(from_bytes(ask)))
        self._answers.append(answer)
        return to_bytes(tuple(answer))

    def at_once(self, ask: Ask) -> Answer:
        return self._answers[-1]

    def settle(self) -> None:
        while len(self._answers) > KEPT_CALLS:
            answer = self._answers.popleft()
            self._router.release(range(answer.first, answer.first + len(answer.entries)))


def measure_actor(num_workers: int, *, num_calls: int, repeats: int = 7) -> dict[str, float]:
    """Items a second of one caller, one call after the other and both methods in turn: medians of some repeats."""
    import ray

    from cluster.config import parse_config
    from cluster.lifecycle.local_ray import connect

    config = parse_config({"num_workers": 1, "worker": {"encoder": {"model": "simulated"}}}, source="bench")
    with connect(config) or nullcontext():
        actor: Any = ray.remote(_BenchActor).options(num_cpus=0).remote(num_workers)
        calls = asks(num_calls, random.Random(1))
        times: dict[str, list[float]] = {"ask": [], "at_once": []}
        for _ in range(repeats + 1):  # the first one warms up
            taken_s = dict.fromkeys(times, 0.0)
            for ask in calls:
                for method in times:
                    started_s = time.perf_counter()
                    if method == "ask":
                        from_bytes(ray.get(actor.ask.remote(to_bytes(tuple(ask)))))
                    else:
                        ray.get(actor.at_once.remote(ask))
                    taken_s[method] += time.perf_counter() - started_s
                ray.get(actor.settle.remote())
            for method, total_s in taken_s.items():
                times[method].append(total_s)
        return {method: num_calls * BATCH / statistics.median(taken[1:]) for method, taken in times.items()}
