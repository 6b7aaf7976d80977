"""A simulated day of skewed traffic under several policies: when is the last item done?"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

from cluster.benchmark.simulated import GRIDS, NUM_KEYS, WEIGHTS, simulated_router
from cluster.routing.leases import Ask

NOISE = 0.1  # of what items take in truth, to what was predicted


@dataclass(frozen=True, kw_only=True)
class Day:
    """What became of a day's traffic under one policy."""

    policy: str
    makespan_h: float  # until the last item was done
    mean_min: float  # from arrival to the end
    p99_min: float
    hit_rate: float


def simulate_days(num_workers: int, num_items: int, *, load: float = 0.85, seed: int = 0) -> list[Day]:
    """The same traffic under each policy; `load` is the work, were all of it hits, over the pool's time in a day."""
    rng = random.Random(seed)
    router = simulated_router(num_workers, rng)
    views = list(router.roster.views.values())
    shapes = rng.choices(range(NUM_KEYS), WEIGHTS, k=num_items)
    noise = [rng.lognormvariate(0.0, NOISE) for _ in shapes]
    rates = [1 - 0.6 * math.cos(2 * math.pi * minute / 1440) for minute in range(1440)]  # most at noon
    hit_ms = 0.05 * sum(math.prod(GRIDS[shape]) for shape in shapes)
    day_ms = hit_ms / (load * num_workers)
    minutes = rng.choices(range(1440), rates, k=num_items)
    arrivals = sorted((minute + rng.random()) / 1440 * day_ms for minute in minutes)
    pending = [0] * num_workers
    turn = count()

    def two() -> int:
        one, other = rng.randrange(num_workers), rng.randrange(num_workers)
        return one if pending[one] <= pending[other] else other

    policies: dict[str, Callable[[], int] | None] = {
        "router": None,
        "round-robin": lambda: next(turn) % num_workers,
        "random": lambda: rng.randrange(num_workers),
        "least-pending": lambda: min(range(num_workers), key=pending.__getitem__),
        "power-of-two": two,
    }
    numbers = {view.worker_id: number for number, view in enumerate(views)}
    days = []
    for name, choose in policies.items():
        free_ms = [0.0] * num_workers
        under_way: list[tuple[float, int, int]] = []
        took, hits = [], 0
        for index, now_ms in enumerate(arrivals):
            while under_way and under_way[0][0] <= now_ms:
                _, lease_id, worker = heappop(under_way)
                pending[worker] -= 1
                router.release([lease_id])
            grids = (GRIDS[shapes[index]],)
            lease_id = 0
            if choose is None:
                lease_id, (grant,), _ = router.lease(Ask([grids], [0], [0], {}, []))
                assert isinstance(grant, tuple)
                worker = numbers[grant[0]]
            else:
                worker = choose()
            quote = views[worker].costs.quote(grids)
            hits += quote.held
            free_ms[worker] = max(now_ms, free_ms[worker]) + quote.cost_ms * noise[index]
            pending[worker] += 1
            took.append(free_ms[worker] - now_ms)
            heappush(under_way, (free_ms[worker], lease_id, worker))
        router.release([lease_id for _, lease_id, _ in under_way])
        pending[:] = [0] * num_workers
        took.sort()
        hour_ms = day_ms / 24
        days.append(
            Day(
                policy=name,
                makespan_h=max(free_ms) / hour_ms,
                mean_min=60 * statistics.fmean(took) / hour_ms,
                p99_min=60 * took[int(0.99 * len(took))] / hour_ms,
                hit_rate=hits / num_items,
            )
        )
    return days
