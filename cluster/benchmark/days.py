"""A simulated day of skewed traffic under several policies: when is the last item done?"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

from cluster.benchmark.simulated import GRIDS, NUM_KEYS, WEIGHTS, simulated_router
from cluster.routing.leases import Ask
from cluster.routing.router import Router
from cluster.routing.worker_view import WorkerView
from encoder.types import Grid

NOISE = 0.1  # of what items take in truth, to what was predicted

Choose = Callable[[tuple[Grid, ...]], tuple[int, int]]
"""The number of the worker that takes an item of these grids, and its lease; 0 without one."""


@dataclass(frozen=True, kw_only=True)
class Day:
    """What became of a day's traffic under one policy."""

    policy: str
    makespan_h: float  # until the last item was done
    mean_min: float  # from arrival to the end
    p99_min: float
    hit_rate: float


@dataclass(frozen=True, slots=True)
class _Arrival:
    """An item of the day."""

    at_ms: float
    grids: tuple[Grid, ...]
    noise: float  # what it takes in truth, over what is predicted


def simulate_days(num_workers: int, num_items: int, *, load: float = 0.85, seed: int = 0) -> list[Day]:
    """The same traffic under each policy; `load` is the work, were all of it hits, over the pool's time in a day."""
    rng = random.Random(seed)
    router = simulated_router(num_workers, rng)
    views = list(router.roster.views.values())
    numbers = {view.worker_id: number for number, view in enumerate(views)}
    day_ms, arrivals = _arrivals(num_workers, num_items, load, rng)
    pending = [0] * num_workers
    turn = count()

    def leased(grids: tuple[Grid, ...]) -> tuple[int, int]:
        lease_id, (grant,), _ = router.lease(Ask([grids], [0], [0], {}, []))
        assert isinstance(grant, tuple)
        return numbers[grant[0]], lease_id

    def two(grids: tuple[Grid, ...]) -> tuple[int, int]:
        one, other = rng.randrange(num_workers), rng.randrange(num_workers)
        return (one if pending[one] <= pending[other] else other), 0

    policies: dict[str, Choose] = {
        "router": leased,
        "round-robin": lambda grids: (next(turn) % num_workers, 0),
        "random": lambda grids: (rng.randrange(num_workers), 0),
        "least-pending": lambda grids: (min(range(num_workers), key=pending.__getitem__), 0),
        "power-of-two": two,
    }
    return [_day(name, choose, arrivals, day_ms, router, views, pending) for name, choose in policies.items()]


def _arrivals(num_workers: int, num_items: int, load: float, rng: random.Random) -> tuple[float, list[_Arrival]]:
    """The length of the day in milliseconds of simulated work, and its items in the order they come: most at noon."""
    shapes = rng.choices(range(NUM_KEYS), WEIGHTS, k=num_items)
    noise = [rng.lognormvariate(0.0, NOISE) for _ in shapes]
    rates = [1 - 0.6 * math.cos(2 * math.pi * minute / 1440) for minute in range(1440)]
    day_ms = 0.05 * sum(math.prod(GRIDS[shape]) for shape in shapes) / (load * num_workers)
    minutes = rng.choices(range(1440), rates, k=num_items)
    at_ms = sorted((minute + rng.random()) / 1440 * day_ms for minute in minutes)
    return day_ms, [_Arrival(ms, (GRIDS[shape],), off) for ms, shape, off in zip(at_ms, shapes, noise, strict=True)]


def _day(
    policy: str,
    choose: Choose,
    arrivals: Sequence[_Arrival],
    day_ms: float,
    router: Router,
    views: Sequence[WorkerView],
    pending: list[int],
) -> Day:
    """Play the day. `pending`, of each worker, is kept up to date for those who choose by it."""
    free_ms = [0.0] * len(views)
    under_way: list[tuple[float, int, int]] = []
    took, hits = [], 0
    for one in arrivals:
        while under_way and under_way[0][0] <= one.at_ms:
            _, lease_id, worker = heappop(under_way)
            pending[worker] -= 1
            router.release([lease_id])
        worker, lease_id = choose(one.grids)
        quote = views[worker].costs.quote(one.grids)
        hits += quote.held
        free_ms[worker] = max(one.at_ms, free_ms[worker]) + quote.cost_ms * one.noise
        pending[worker] += 1
        took.append(free_ms[worker] - one.at_ms)
        heappush(under_way, (free_ms[worker], lease_id, worker))
    router.release([lease_id for _, lease_id, _ in under_way])
    pending[:] = [0] * len(views)
    took.sort()
    hour_ms = day_ms / 24
    return Day(
        policy=policy,
        makespan_h=max(free_ms) / hour_ms,
        mean_min=60 * statistics.fmean(took) / hour_ms,
        p99_min=60 * took[int(0.99 * len(took))] / hour_ms,
        hit_rate=hits / len(arrivals),
    )
