"""Which graphs each worker holds: `plan`, a pure function over traffic, costs and memory. No Ray, no torch.

The problem is placement with load: sets of graphs under a knapsack of bytes on each worker, and items that go to one
worker each, whose time is bounded. Max-coverage, data placement and separable assignment (Fleischer, Goemans,
Mirrokni, Sviridenko 2006) are special cases, so it is NP-hard, and `plan` is greedy:

1. *Cover*: the graphs that take most of the traffic not yet taken by any, smallest first among equals. A general
   layout such as "packed" takes everything and so comes first.
2. *By shadow price*: `spread` solves the relaxation "who works on what" for the sets so far and says what a
   millisecond of each worker is worth. At these prices a further graph gains what the best use of its worker's time
   with it would gain, a fractional knapsack over kinds of items; the best gain a byte is taken, with stale gains
   re-evaluated only when they come to the top (lazy greedy: Minoux 1978; CELF: Leskovec et al. 2007). Work and time
   that a pick takes are gone for the next picks of the round, so hot graphs come on as many workers as the traffic
   fills, and cold ones on one. Then the relaxation is solved again.
3. *Leftovers*: memory that remains takes first graphs that are cheaper for something than all that is held in the
   pool, then further copies.

As in Khuller, Moss and Naor 1999, greedy by gain and by gain a byte are both tried (either alone can be arbitrarily
bad), also at halved memory, also the same set on every worker; the best by (traffic covered, time of the busiest
worker) is the plan. Single exchanges as local search were tried on top and hardly ever helped.

With W different workers, K candidates, I kinds of items and P picks, gains take O((P / W + 1) W K I log I) and the
relaxations O((P / W + 1) 80 I W); equal workers count once. No constant is proven for the joint problem: on 250
random small ones, of what the best plan of equal coverage saves, the plan saves 99 % on average, 78 % in all but one,
and 29 % in that one, where coverage is had by a graph that hardly pays.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cluster.planning.forecast import Candidate, Forecast, Prices, WorkerRoom, forecast
from cluster.planning.histogram import Grids
from cluster.planning.placing import Placing, Sets
from encoder.packing import EagerCost
from encoder.types import AxisKeys, GraphKey, Grid, SegmentShape

MAX_KINDS = 512
"""Kinds of items that a plan tells apart; the most frequent stand for the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The graph set of one worker."""

    worker_id: str
    keys: tuple[GraphKey, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A graph set for each worker, and what it should bring."""

    placements: tuple[Placement, ...]
    covered: float  # share of segments that a graph somewhere in the pool serves in less than the eager time
    forecast: Forecast
    current: Forecast | None  # of the sets held now
    busy: float  # share of time that workers were taken to be at work

    def sets(self) -> dict[str, tuple[GraphKey, ...]]:
        """Graph keys by worker."""
        return {placement.worker_id: placement.keys for placement in self.placements}


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What one worker has to do to hold its planned set."""

    worker_id: str
    drop: tuple[GraphKey, ...]
    capture: tuple[GraphKey, ...]


def plan(
    traffic: Mapping[Grids, float],
    candidates: Sequence[Candidate],
    workers: Sequence[WorkerRoom],
    *,
    axis_choices: Callable[[Grid], list[AxisKeys]],
    measure: Callable[[Grid], SegmentShape],
    eager: EagerCost,
    busy: float | None = None,
    current: Mapping[str, Collection[GraphKey]] | None = None,
) -> Plan:
    """Choose the graphs of each worker. The same arguments give the same plan; order and names of workers do not count.

    Args:
        traffic: items per second of each kind (`TrafficHistogram.rates`).
        candidates: graphs that could be held, with what they cost.
        workers: at least one.
        axis_choices, measure: the adapter's.
        eager: what eager runs cost, at speed 1.
        busy: share of time that workers are at work, 0 to 1: at 1 replays are full. None: inferred from the traffic.
        current: the sets held now, by worker; keys without a candidate are ignored. Among equally good plans the one
            with fewest captures is returned.
    """
    assert workers, "a plan is for at least one worker"
    ordered = sorted(workers, key=lambda worker: (-worker.speed, -worker.memory_bytes, worker.worker_id))
    named = sorted(candidates, key=lambda one: (str(one.key.axis_keys), one.key.token_budget))
    speeds = [worker.speed for worker in ordered]
    prices = Prices(
        _most_frequent(traffic), named, axis_choices=axis_choices, measure=measure, eager=eager,
        total_speed=sum(speeds), busy=busy,
    )  # fmt: skip
    now = None
    if current is not None:
        numbers = {one.key: k for k, one in enumerate(named)}
        held = [tuple(numbers[key] for key in current.get(w.worker_id, ()) if key in numbers) for w in ordered]
        now = forecast(prices, held, speeds)
    memory = [worker.memory_bytes for worker in ordered]
    sets = _best(prices, speeds, memory)
    if current is not None:
        sets = _keep_in_place(prices, sets, held, ordered)
    placements = {
        worker.worker_id: Placement(
            worker_id=worker.worker_id,
            keys=tuple(named[k].key for k in sorted(graphs)),
            num_bytes=prices.num_bytes(graphs),
        )
        for worker, graphs in zip(ordered, sets, strict=True)
    }
    return Plan(
        placements=tuple(placements[worker.worker_id] for worker in workers),
        covered=_covered(prices, sets),
        forecast=forecast(prices, sets, speeds),
        current=now,
        busy=prices.busy,
    )


def changes(current: Mapping[str, Collection[GraphKey]], proposed: Plan) -> list[Change]:
    """What each worker has to drop and capture, for workers that have anything to do; largest graphs first."""
    found = []
    for placement in proposed.placements:
        held = set(current.get(placement.worker_id, ()))
        drop = tuple(sorted(held - set(placement.keys), key=_largest_first))
        capture = tuple(sorted(set(placement.keys) - held, key=_largest_first))
        if drop or capture:
            found.append(Change(worker_id=placement.worker_id, drop=drop, capture=capture))
    return found


def pays(
    current: Forecast, proposed: Forecast, *, capture_ms: float, horizon_s: float = 600.0, least_gain: float = 0.03
) -> bool:
    """Whether changing the sets is worth it: hysteresis, so that a pool does not capture to and fro.

    Args:
        capture_ms: GPU time that the change takes on all workers together.
        horizon_s: how long the traffic is trusted to stay as it is.
        least_gain: share of the current time that has to be saved, whatever the change costs.
    """
    saved_ms_per_s = current.ms_per_s - proposed.ms_per_s
    return saved_ms_per_s > least_gain * current.ms_per_s and saved_ms_per_s * horizon_s > capture_ms


def _largest_first(key: GraphKey) -> tuple[int, str]:
    return -key.token_budget, str(key)


def _most_frequent(traffic: Mapping[Grids, float]) -> dict[Grids, float]:
    """The `MAX_KINDS` most frequent kinds, scaled up to all of the traffic; the order of an item's grids dropped."""
    kinds: dict[Grids, float] = defaultdict(float)
    for grids, rate in traffic.items():
        kinds[tuple(sorted(grids))] += rate
    kept = sorted(kinds.items(), key=lambda kind: (-kind[1], kind[0]))[:MAX_KINDS]
    scale = sum(kinds.values()) / max(sum(rate for _, rate in kept), 1e-300)
    return {grids: rate * scale for grids, rate in kept}


# --- attempts and the choice among them ------------------------------------------------------------------------------


_NOISE = 0.005  # of a busiest worker's time: the relaxation is solved no more exactly

Merit = tuple[float, float, int]
"""Less is better: traffic not covered, time of the busiest worker, bytes."""


def _best(prices: Prices, speeds: Sequence[float], memory: Sequence[int]) -> Sets:
    """The best of all attempts at full memory and at halves of it.

    What is best for half the memory is an attempt for the whole, so twice the memory is not worse.
    """
    everything = range(len(prices.candidates))
    smallest = min((prices.num_bytes([k]) for k in everything), default=0)
    levels = [list(memory)]
    while max(levels[-1]) >= max(1, smallest) and any(prices.num_bytes(everything) > limit for limit in levels[-1]):
        levels.append([limit // 2 for limit in levels[-1]])
    best: Sets = [()] * len(speeds)
    for limits in reversed(levels):
        attempts = [_filled(prices, best, speeds, limits), *_attempts(prices, speeds, limits)]
        found = min(attempts, key=lambda sets: _merit(prices, sets, speeds))
        now, before = _merit(prices, found, speeds), _merit(prices, best, speeds)
        if before[0] < now[0] or (before[0] == now[0] and before[1] < now[1] * (1 - _NOISE)):
            continue  # filling up what was best for less memory slows some kinds down: it stays as it is
        best = found
    return best


def _merit(prices: Prices, sets: Sets, speeds: Sequence[float]) -> Merit:
    busiest_ms = forecast(prices, sets, speeds).busiest_ms_per_s
    return -round(_covered(prices, sets), 9), busiest_ms, sum(prices.num_bytes(graphs) for graphs in sets)


def _attempts(prices: Prices, speeds: Sequence[float], limits: Sequence[int]) -> Iterator[Sets]:
    """Greedy in several ways."""
    roomy = all(prices.num_bytes(range(len(prices.candidates))) <= limit for limit in limits)
    same = Placing(prices, speeds, limits)
    same.copy_everywhere()
    yield same.sets()
    for by_byte in (True,) if roomy else (True, False):
        for cover_first in (True,) if roomy else (True, False):
            placing = Placing(prices, speeds, limits)
            if cover_first:
                placing.cover()
            placing.by_shadow_price(by_byte=by_byte)
            placing.cover()
            placing.use_leftovers()
            yield placing.sets()


def _filled(prices: Prices, sets: Sets, speeds: Sequence[float], limits: Sequence[int]) -> Sets:
    """The sets, and what memory is left for."""
    placing = Placing(prices, speeds, limits, sets)
    placing.cover()
    placing.use_leftovers()
    return placing.sets()


def _covered(prices: Prices, sets: Sets) -> float:
    """Share of segments that a graph somewhere serves in less than the eager time."""
    taken_R = np.zeros(len(prices.kind_R), dtype=bool)
    for graphs in set(sets):
        taken_R |= prices.holding(graphs).price_R < prices.eager_R
    weight_R = prices.rate_I[prices.kind_R] * prices.count_R
    return float(weight_R @ taken_R / weight_R.sum()) if weight_R.sum() else 0.0


def _keep_in_place(prices: Prices, sets: Sets, held: Sets, workers: Sequence[WorkerRoom]) -> Sets:
    """Hand the sets of equal workers to those that hold most of them already."""
    placed = list(sets)
    equals: dict[tuple[int, float], list[int]] = defaultdict(list)
    for number, worker in enumerate(workers):
        equals[worker.memory_bytes, worker.speed].append(number)
    for numbers in equals.values():
        pairs = sorted(
            (-prices.num_bytes(sorted(set(sets[giver]) & set(held[taker]))), taker, giver)
            for giver in numbers
            for taker in numbers
        )
        givers, takers = set(numbers), set(numbers)
        for _, taker, giver in pairs:
            if giver in givers and taker in takers:
                placed[taker] = sets[giver]
                givers.remove(giver)
                takers.remove(taker)
    return placed
