"""Placement of graph sets: bounds, coverage, quality against trying everything, and no dependence on names."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.planning.forecast import Candidate, Forecast, Prices, WorkerRoom, forecast, spread
from cluster.planning.placing import Placing, Sets
from cluster.planning.plan import Plan, changes, pays, plan
from encoder.packing import EagerCost, GraphView
from encoder.types import AxisKeys, Capacity, GraphKey, Grid, SegmentShape
from workers.costs import CostTable

Kinds = dict[tuple[Grid, ...], float]
TOKENS = 64
EAGER = EagerCost(base_ms=3.0, ms_per_patch=0.0029)
SQUARE, WIDE = (1, 32, 32), (1, 24, 43)


def axis_choices(grid: Grid) -> list[AxisKeys]:
    return [(f"{grid[1]}x{grid[2]}",), ("packed",)]


def measure(grid: Grid) -> SegmentShape:
    return SegmentShape(grid=grid, num_patches=grid[1] * grid[2], num_tokens=TOKENS)


def candidate(
    layout: str, segments: int, *, cost_ms: float, num_bytes: int = 10, patches: int = 1040, shared_bytes: int = 0
) -> Candidate:
    return Candidate(
        key=GraphKey(encoder="toy", path="image", axis_keys=(layout,), token_budget=segments * TOKENS),
        capacity=Capacity(
            patches=segments * patches, segments=segments, tokens=segments * TOKENS, longest=max(patches, 1300)
        ),
        cost_ms=cost_ms,
        num_bytes=num_bytes,
        shared_bytes=shared_bytes,
    )


def rooms(*memory: int, speed: float = 1.0) -> list[WorkerRoom]:
    return [WorkerRoom(worker_id=f"w{n}", memory_bytes=each, speed=speed) for n, each in enumerate(memory)]


def planned(
    traffic: Kinds,
    candidates: Sequence[Candidate],
    workers: Sequence[WorkerRoom],
    *,
    busy: float | None = 1.0,
    current: Mapping[str, Sequence[GraphKey]] | None = None,
    eager: EagerCost = EAGER,
) -> Plan:
    return plan(
        traffic, candidates, workers,
        axis_choices=axis_choices, measure=measure, eager=eager, busy=busy, current=current,
    )  # fmt: skip


def prices(traffic: Kinds, candidates: Sequence[Candidate], *, speed: float = 1.0, busy: float | None = 1.0) -> Prices:
    return Prices(
        traffic, candidates, axis_choices=axis_choices, measure=measure, eager=EAGER, total_speed=speed, busy=busy
    )  # fmt: skip


def scenario(seed: int, num_workers: int = 2) -> tuple[Kinds, list[Candidate], list[WorkerRoom], float | None]:
    """A small random problem: mixed items, packed and exact graphs of several budgets, unequal workers."""
    rng = random.Random(seed)
    grids = [(1, rows, max(12, round(1024 / rows))) for rows in {rng.randint(16, 60) for _ in range(3)}]
    traffic = {
        tuple(rng.choices(grids, k=rng.randint(1, 4))): rng.expovariate(1) * 50 for _ in range(rng.randint(1, 5))
    }
    candidates = [
        candidate("packed", n, cost_ms=1 + n * rng.uniform(1.6, 3), num_bytes=rng.randint(20, 100),
                  shared_bytes=rng.choice([0, 0, 40]))
        for n in rng.sample([1, 4, 16], rng.randint(1, 2))
    ]  # fmt: skip
    for _, rows, columns in grids[: 4 - len(candidates)]:
        n, area = rng.choice([1, 4, 16]), rows * columns
        candidates.append(
            candidate(f"{rows}x{columns}", n, cost_ms=0.5 + n * area * rng.uniform(0.0008, 0.003), patches=area,
                      num_bytes=rng.randint(20, 100))
        )  # fmt: skip
    workers = [
        WorkerRoom(worker_id=f"w{n}", memory_bytes=rng.randint(20, 220), speed=rng.choice([1.0, 1.0, 0.5]))
        for n in range(num_workers)
    ]
    return traffic, candidates, workers, rng.choice([None, 1.0, 0.3])


def skewed(num_workers: int, memory: int) -> tuple[Kinds, list[Candidate], list[WorkerRoom]]:
    """24 kinds of items with Zipf's frequencies; one packed graph of 80 bytes, an exact graph of 35 for each grid."""
    rng = random.Random(0)
    grids = [(1, rows, round(1024 / rows)) for rows in rng.sample(range(16, 61), 24)]
    weights = [1 / (rank + 1) ** 1.1 for rank in range(24)]
    traffic = {
        (grid,) * rng.choice([1, 3, 4, 6, 9]): 50 * num_workers * weight / sum(weights)
        for grid, weight in zip(grids, weights, strict=True)
    }
    candidates = [candidate("packed", 16, cost_ms=33.0, num_bytes=80)]
    for _, rows, columns in grids:
        area = rows * columns
        candidates.append(
            candidate(f"{rows}x{columns}", 16, cost_ms=16 * area * 0.00145, patches=area, num_bytes=35)
        )  # fmt: skip
    return traffic, candidates, rooms(*[memory] * num_workers)


def uniform(price_list: Prices, workers: Sequence[WorkerRoom]) -> Forecast:
    speeds = [worker.speed for worker in workers]
    placing = Placing(price_list, speeds, [worker.memory_bytes for worker in workers])
    placing.copy_everywhere()
    return forecast(price_list, placing.sets(), speeds)


def random_sets(price_list: Prices, workers: Sequence[WorkerRoom], rng: random.Random) -> Sets:
    sets: Sets = []
    for worker in workers:
        graphs: tuple[int, ...] = ()
        for k in rng.sample(range(len(price_list.candidates)), len(price_list.candidates)):
            if price_list.num_bytes((*graphs, k)) <= worker.memory_bytes:
                graphs = (*graphs, k)
        sets.append(graphs)
    return sets


# --- prices and forecasts --------------------------------------------------------------------------------------------


def test_a_busy_pool_pays_what_the_router_quotes() -> None:
    candidates = [candidate("packed", 16, cost_ms=33), candidate("32x32", 4, cost_ms=6, patches=1024)]
    items: Kinds = {(SQUARE, WIDE, WIDE): 1.0, (WIDE,): 2.0}
    quotes = CostTable(
        [GraphView(key=one.key, capacity=one.capacity, cost_ms=one.cost_ms) for one in candidates],
        axis_choices=axis_choices, measure=measure, eager_ms_per_patch=EAGER.ms_per_patch,
    )  # fmt: skip
    price_list = prices(items, candidates)
    paid_I = price_list.by_kind(price_list.holding([0, 1]).price_R)
    assert list(paid_I) == pytest.approx([quotes.quote(grids).cost_ms for grids in sorted(items)])


def test_an_item_that_comes_alone_pays_for_the_padding() -> None:
    candidates = [candidate("packed", 4, cost_ms=8)]
    for busy, cost_ms in ((1.0, 3 * 2.0), (0.0, 8.0), (0.5, 7.0)):
        price_list = prices({(SQUARE,) * 3: 1.0}, candidates, busy=busy)
        assert price_list.by_kind(price_list.holding([0]).price_R)[0] == pytest.approx(cost_ms, rel=0.02)


def test_a_segment_goes_to_the_tightest_graph_even_if_a_looser_one_is_cheaper() -> None:
    candidates = [candidate("packed", 16, cost_ms=16), candidate("32x32", 1, cost_ms=2, patches=1024)]
    price_list = prices({(SQUARE,): 1.0}, candidates)
    assert price_list.holding([0, 1]).price_R[0] == price_list.holding([1, 0]).price_R[0] == 2.0


def test_fill_and_hit_rate_of_a_forecast() -> None:
    price_list = prices(
        {(SQUARE,): 3.0, ((1, 50, 50),): 1.0}, [candidate("packed", 4, cost_ms=4, patches=1024)], busy=0.0
    )
    found = forecast(price_list, [(0,)], [1.0])
    assert found.hit_rate == pytest.approx(0.75)  # 2500 patches are longer than the graph's longest
    assert found.fill == pytest.approx(0.25)  # each square rides alone in a graph for four


@pytest.mark.parametrize("seed", range(40))
def test_the_spread_is_near_the_bound_that_its_prices_prove(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_kinds, num_groups = rng.integers(1, 30), rng.integers(1, 12)
    price_IG = rng.lognormal(0, 1, (num_kinds, num_groups))
    rate_I, speed_G = rng.lognormal(0, 1.5, num_kinds), rng.choice([1.0, 2.0, 5.0], num_groups)
    found = spread(price_IG, rate_I, speed_G)
    assert found.share_IG.sum(axis=1) == pytest.approx(1)
    assert (rate_I @ (found.share_IG * price_IG / speed_G)).max() == pytest.approx(found.busiest_ms)
    assert found.at_least_ms <= found.busiest_ms * (1 + 1e-9)
    assert found.busiest_ms <= found.at_least_ms * 1.06


# --- plans -----------------------------------------------------------------------------------------------------------


def test_the_general_fallback_comes_first_when_memory_is_short() -> None:
    candidates = [candidate("packed", 16, cost_ms=33, num_bytes=80), candidate("32x32", 16, cost_ms=20, num_bytes=80)]
    proposed = planned({(SQUARE,): 5.0, (WIDE,): 1.0}, candidates, rooms(80))
    assert [key.axis_keys for key in proposed.sets()["w0"]] == [("packed",)]
    assert proposed.covered == 1.0


def test_hot_graphs_are_on_many_workers_and_cold_ones_on_one() -> None:
    traffic, candidates, workers = skewed(8, memory=250)
    proposed = planned(traffic, candidates, workers)
    copies = Counter(str(key.axis_keys[0]) for keys in proposed.sets().values() for key in keys)
    by_heat = [
        copies[f"{grids[0][1]}x{grids[0][2]}"]
        for grids, _ in sorted(traffic.items(), key=lambda kind: -kind[1] * len(kind[0]))
    ]
    assert by_heat[0] >= 4
    assert set(by_heat[8:]) == {1}


def test_the_plan_beats_one_set_for_all_and_random_sets() -> None:
    traffic, candidates, workers = skewed(8, memory=120)
    proposed = planned(traffic, candidates, workers).forecast
    price_list = prices(traffic, candidates)
    rng = random.Random(0)
    by_chance = [forecast(price_list, random_sets(price_list, workers, rng), [1.0] * 8) for _ in range(5)]
    assert proposed.busiest_ms_per_s < 0.9 * uniform(price_list, workers).busiest_ms_per_s
    assert proposed.busiest_ms_per_s < 0.9 * min(one.busiest_ms_per_s for one in by_chance)
    assert proposed.hit_rate > 0.95 > max(one.hit_rate for one in by_chance)
    assert 0 < proposed.saved < 1


def test_ample_memory_holds_everything_that_pays_everywhere() -> None:
    traffic, candidates, workers = skewed(3, memory=10_000)
    slow = candidate("packed", 1, cost_ms=50.0)  # dearer than eager: worth no byte
    proposed = planned(traffic, [*candidates, slow], workers)
    exact = {one.key for one in candidates[1:]}
    assert all(exact <= set(keys) for keys in proposed.sets().values())
    assert all(slow.key not in keys for keys in proposed.sets().values())


def test_small_graphs_are_held_for_items_that_come_alone_and_large_ones_for_a_busy_pool() -> None:
    candidates = [candidate("packed", 1, cost_ms=3, num_bytes=40), candidate("packed", 16, cost_ms=32, num_bytes=80)]
    for busy, budget in ((0.0, TOKENS), (1.0, 16 * TOKENS)):
        proposed = planned({(SQUARE,): 10.0}, candidates, rooms(100), busy=busy)
        assert [key.token_budget for key in proposed.sets()["w0"]] == [budget]


def test_eager_runs_that_nobody_measured_replace_no_replay() -> None:
    """Workers replay what their graphs hold, however cheap a guess makes eager runs: there a fitting graph pays."""
    small, large = (candidate("packed", n, cost_ms=24.0 * n) for n in (1, 8))
    for measured, then in ((True, set()), (False, {small.key})):
        eager = EagerCost(base_ms=0.0, ms_per_patch=0.02, measured=measured)  # 20.5 ms a square
        proposed = planned(
            {(SQUARE,): 2.0}, [small, large], rooms(1000), busy=0.1, current={"w0": [large.key]}, eager=eager
        )
        assert proposed.current is not None
        assert proposed.current.hit_rate == (0.0 if measured else 1.0)
        assert {*proposed.sets()["w0"]} - {large.key} == then
        assert proposed.forecast.ms_per_s == pytest.approx(2.0 * (20.48 if measured else 24.0))


def test_no_traffic_and_no_candidates_plan_nothing() -> None:
    assert planned({}, [candidate("packed", 4, cost_ms=8)], rooms(100)).sets() == {"w0": ()}
    nothing = planned({(SQUARE,): 1.0}, [], rooms(100, 100))
    assert nothing.forecast.hit_rate == nothing.covered == 0.0
    assert nothing.forecast.ms_per_s == pytest.approx(nothing.forecast.eager_ms_per_s)


@pytest.mark.parametrize("seed", range(8))
def test_the_plan_is_near_the_best_of_all_plans(seed: int) -> None:
    """Of the eager time that the best plan with the same coverage saves, ours saves at least six tenths.

    No constant is proven for the joint problem; over 250 like these the mean was 0.99 and one was under 0.77.
    """
    traffic, candidates, workers, busy = scenario(seed)
    speeds = [worker.speed for worker in workers]
    price_list = prices(traffic, candidates, speed=sum(speeds), busy=busy)
    subsets = [s for n in range(len(candidates) + 1) for s in itertools.combinations(range(len(candidates)), n)]
    fitting = [[s for s in subsets if price_list.num_bytes(s) <= worker.memory_bytes] for worker in workers]
    proposed = planned(traffic, candidates, workers, busy=busy)

    def covered(sets: Sequence[Sequence[int]]) -> float:
        served_R = np.any([price_list.holding(s).price_R < price_list.eager_R for s in sets], axis=0)
        weight_R = price_list.rate_I[price_list.kind_R] * price_list.count_R
        return round(float(weight_R @ served_R / weight_R.sum()), 9)

    plans = list(itertools.product(*fitting))
    most = max(map(covered, plans))
    best_ms = min(forecast(price_list, s, speeds).busiest_ms_per_s for s in plans if covered(s) == most)
    eager_ms = forecast(price_list, [()] * len(workers), speeds).busiest_ms_per_s
    assert proposed.covered == pytest.approx(most)
    assert eager_ms - proposed.forecast.busiest_ms_per_s >= 0.6 * (eager_ms - best_ms) - 1e-6 * eager_ms


@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.integers(0, 10_000), st.integers(1, 4))
def test_memory_is_never_exceeded_and_what_fits_and_pays_is_placed(seed: int, num_workers: int) -> None:
    traffic, candidates, workers, busy = scenario(seed, num_workers)
    proposed = planned(traffic, candidates, workers, busy=busy)
    price_list = prices(traffic, candidates, speed=sum(worker.speed for worker in workers), busy=busy)
    numbers = {one.key: k for k, one in enumerate(candidates)}
    sets = [[numbers[key] for key in keys] for keys in proposed.sets().values()]
    best_R = np.min([*(price_list.holding(s).price_R for s in sets), price_list.eager_R], axis=0)
    for worker, placement, s in zip(workers, proposed.placements, sets, strict=True):
        assert placement.num_bytes == price_list.num_bytes(s) <= worker.memory_bytes
        for k in set(range(len(candidates))) - set(s):
            if price_list.num_bytes([*s, k]) <= worker.memory_bytes:
                with_it_I = price_list.by_kind(price_list.holding([*s, k]).price_R)
                assert (with_it_I >= price_list.by_kind(best_R) - 1e-9).all()  # nothing that still fits would help


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10_000))
def test_twice_the_memory_is_never_worse(seed: int) -> None:
    traffic, candidates, workers, busy = scenario(seed)
    doubled = [
        WorkerRoom(worker_id=w.worker_id, memory_bytes=2 * w.memory_bytes, speed=w.speed) for w in workers
    ]  # fmt: skip
    less, more = (planned(traffic, candidates, some, busy=busy) for some in (workers, doubled))
    assert more.covered >= less.covered - 1e-9
    if more.covered < less.covered + 1e-9:
        assert more.forecast.busiest_ms_per_s <= less.forecast.busiest_ms_per_s * 1.01


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10_000), st.randoms(use_true_random=False))
def test_order_and_names_of_equal_workers_do_not_count(seed: int, rng: random.Random) -> None:
    traffic, candidates, _, busy = scenario(seed)
    proposed = planned(traffic, candidates, rooms(90, 90, 90, 150), busy=busy)
    shuffled = rng.sample(rooms(90, 90, 90, 150), 4)
    again = planned(dict(reversed(traffic.items())), rng.sample(candidates, len(candidates)), shuffled, busy=busy)
    assert [placement.worker_id for placement in again.placements] == [worker.worker_id for worker in shuffled]
    assert Counter(again.sets().values()) == Counter(proposed.sets().values())
    assert again.forecast.busiest_ms_per_s == pytest.approx(proposed.forecast.busiest_ms_per_s)


# --- from the sets of now to the planned ones ------------------------------------------------------------------------


def test_equal_workers_keep_what_they_hold() -> None:
    traffic, candidates, workers = skewed(4, memory=120)
    first = planned(traffic, candidates, workers)
    held = dict(zip([w.worker_id for w in workers], reversed(list(first.sets().values())), strict=True))
    again = planned(traffic, candidates, workers, current=held)
    assert again.sets() == held
    assert changes(held, again) == []
    assert again.current == again.forecast


def test_changes_name_what_to_drop_and_capture() -> None:
    small, large, other = (candidate("packed", n, cost_ms=0.5 + 2.0 * n) for n in (1, 16, 4))
    proposed = planned({(SQUARE,) * 16: 1.0}, [small, large], rooms(20))
    change = changes({"w0": [small.key, other.key]}, proposed)[0]
    assert (change.drop, change.capture) == ((other.key, small.key), (large.key,))


def seen(ms_per_s: float) -> Forecast:
    return Forecast(ms_per_s=ms_per_s, busiest_ms_per_s=0, eager_ms_per_s=ms_per_s, hit_rate=1, fill=1)


@pytest.mark.parametrize(
    ("now", "then", "capture_ms", "worth_it"),
    [
        (500, 400, 10_000, True),  # saves 60 s within the horizon of ten minutes
        (500, 400, 70_000, False),  # capturing costs more than is saved
        (500, 490, 0, False),  # within the noise of measured costs
        (500, 600, 0, False),
        (0, 0, 0, False),
    ],
)
def test_a_change_pays_when_it_saves_more_than_it_costs(
    now: float, then: float, capture_ms: float, worth_it: bool
) -> None:
    assert pays(seen(now), seen(then), capture_ms=capture_ms) is worth_it
