"""Routing: who gets an item, and an account of work in flight that always adds up."""

from __future__ import annotations

import gc
import random
from collections import Counter
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import Any

import pytest
from fakes import TOKENS, Clock, fake_adapter, graph, report
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cluster.planning.histogram import TrafficHistogram
from cluster.routing.assign import assign, scan
from cluster.routing.leases import Answer, Ask, Lease, LeaseRequest, Refusal, pack, unpack
from cluster.routing.plans import Plan, Seat
from cluster.routing.router import Router, RouterActor
from cluster.routing.worker_index import WorkerIndex
from cluster.routing.worker_view import WorkerView
from encoder.config import EncoderConfig
from encoder.packing import GraphView
from encoder.types import Grid, ItemShape
from workers.admission import GUARANTEED
from workers.costs import CostTable
from workers.messages import Beat, ErrorNote, Heard, TracedItem, WorkerState
from workers.priority import Priority

GRIDS = ((1, 10, 10),)


def view(worker_id: str, *graphs: GraphView, in_flight_ms: float = 0.0, eager_ms_per_patch: float = 0.1) -> WorkerView:
    adapter = fake_adapter()
    costs = CostTable(
        graphs,
        axis_choices=adapter.axis_choices,
        measure=adapter.measure,
        eager_ms_per_patch=eager_ms_per_patch,
    )
    return WorkerView(
        worker_id=worker_id,
        incarnation=f"{worker_id}/0",
        state=WorkerState.READY,
        costs=costs,
        max_queue_ms=100.0,
        in_flight_ms=in_flight_ms,
    )


def index(*workers: WorkerView, rng: random.Random | None = None) -> WorkerIndex:
    adapter = fake_adapter()
    made = WorkerIndex(axis_choices=adapter.axis_choices, measure=adapter.measure, rng=rng or random.Random(0))
    for worker in workers:
        made.add(worker)
    return made


def assign_one(
    plan: Plan, exclude: tuple[str, ...] = (), num_bytes: int = 0, *, urgent: bool = False
) -> Seat | Refusal:
    """As `assign` does, which counts the item in flight."""
    (seat,), refusals = assign([(plan, num_bytes, exclude, 0)], urgent=urgent)
    return refusals.get(0, seat)


def choose(*workers: WorkerView, exclude: tuple[str, ...] = (), rng: random.Random | None = None) -> Seat | Refusal:
    return assign_one(index(*workers, rng=rng).plan(GRIDS), exclude)


def chosen(*workers: WorkerView, exclude: tuple[str, ...] = (), rng: random.Random | None = None) -> str:
    seat = choose(*workers, exclude=exclude, rng=rng)
    assert isinstance(seat, Seat), seat
    return seat.worker.worker_id


def shape(num_segments: int = 1, height: int = 10) -> ItemShape:
    grid = (1, height, 10)
    return ItemShape(
        grids=(grid,) * num_segments,
        num_patches=num_segments * height * 10,
        num_tokens=num_segments * TOKENS,
    )


# --- assign: the pure choice -----------------------------------------------------------------------------------------


def test_the_holder_of_a_graph_comes_first() -> None:
    assert chosen(view("eager"), view("holder", graph(cost_ms=8)), view("too small", graph(longest=50))) == "holder"


def test_work_goes_elsewhere_once_the_holder_is_too_busy() -> None:
    holder = view("holder", graph(cost_ms=8), in_flight_ms=50)
    assert chosen(view("eager"), holder) == "eager"


def test_the_least_predicted_finish_wins() -> None:
    slow, fast = view("slow", graph(cost_ms=80)), view("fast", graph(cost_ms=8), in_flight_ms=5)
    assert chosen(slow, fast) == "fast"


def test_an_item_costs_its_share_of_the_cheapest_graph() -> None:
    worker = view("w", graph(2, cost_ms=4), graph(16, cost_ms=8))
    assert worker.costs.quote(GRIDS * 3).cost_ms == pytest.approx(3 * 8 / 8)
    assert worker.costs.quote(GRIDS).key == graph(16).key


def test_segments_that_no_graph_takes_are_priced_eagerly() -> None:
    quote = view("w", graph(16, cost_ms=8, longest=100)).costs.quote((*GRIDS, (1, 20, 10)))
    assert quote.cost_ms == pytest.approx(8 / 2 + 100 * 2 * 0.1)
    assert (quote.held, quote.key) == (False, graph(16).key)


def test_a_full_worker_is_passed_over_and_a_full_pool_refuses_with_a_hint() -> None:
    full = view("full", graph(cost_ms=8), in_flight_ms=99.5)
    assert chosen(full, view("eager", in_flight_ms=80)) == "eager"
    refusal = choose(full)
    assert refusal == Refusal(saturated=True, retry_ms=0.5, message="all 1 workers are full; retry in 0 ms")


def test_an_idle_worker_takes_an_item_of_any_cost() -> None:
    assert chosen(view("idle", eager_ms_per_patch=100)) == "idle"


def test_a_worker_is_full_of_bytes_too() -> None:
    heavy = view("heavy", graph(cost_ms=8), in_flight_ms=10)
    heavy.max_queue_bytes, heavy.in_flight_bytes = 1000, 900
    refusal = assign_one(index(heavy).plan(GRIDS), (), 200)
    assert isinstance(refusal, Refusal)
    assert refusal.saturated
    assert refusal.retry_ms == pytest.approx(10 * 100 / 900)
    other = view("other", graph(cost_ms=80))
    seat = assign_one(index(heavy, other).plan(GRIDS), (), 200)
    assert isinstance(seat, Seat)
    assert seat.worker is other


def test_a_pool_full_of_batch_work_takes_interactive_work() -> None:
    full = view("full", graph(cost_ms=8), in_flight_ms=99.5)
    assert isinstance(assign_one(index(full).plan(GRIDS)), Refusal)
    assert isinstance(assign_one(index(full).plan(GRIDS), urgent=True), Seat)
    full.urgent_ms = 24.5  # of the 25 that are its part
    assert isinstance(assign_one(index(full).plan(GRIDS), urgent=True), Refusal)


def test_an_excluded_worker_gets_nothing() -> None:
    holder = view("holder", graph(cost_ms=8))
    assert chosen(holder, view("eager"), exclude=("holder/0",)) == "eager"
    refusal = choose(holder, exclude=("holder/0",))
    assert isinstance(refusal, Refusal)
    assert not refusal.saturated


def test_there_is_a_second_choice_for_who_must_not_go_to_the_first() -> None:
    workers = [view("eager"), view("holder", graph(cost_ms=8)), view("other holder", graph(cost_ms=8))]
    left = {worker.incarnation for worker in workers}
    order = []
    while left:
        order.append(chosen(*workers, exclude=tuple({worker.incarnation for worker in workers} - left)))
        left.discard(f"{order[-1]}/0")
    assert order[2] == "eager"
    assert sorted(order[:2]) == ["holder", "other holder"]


def test_equals_are_drawn_by_lot() -> None:
    rng = random.Random(0)
    draws: Counter[str] = Counter()
    for _ in range(400):
        workers = [view(str(number), graph(cost_ms=8 + number / 100)) for number in range(4)]
        draws[chosen(*workers, rng=rng)] += 1
    assert min(draws.values()) > 60


# --- assign: many workers ---------------------------------------------------------------------------------------------

GRAPH_SETS = st.lists(
    st.sampled_from([(), (graph(cost_ms=8),), (graph(cost_ms=16),), (graph(longest=50),), (graph(2), graph(16))]),
    min_size=1,
    max_size=24,
)
LOADS_MS = st.lists(st.floats(0, 120), min_size=24, max_size=24)


def pool_of(sets: list[tuple[GraphView, ...]], loads_ms: list[float]) -> list[WorkerView]:
    return [
        view(f"w{number}", *graphs, in_flight_ms=load_ms)
        for number, (graphs, load_ms) in enumerate(zip(sets, loads_ms, strict=False))
    ]


@given(sets=GRAPH_SETS, loads_ms=LOADS_MS, num_excluded=st.integers(0, 12), seed=st.integers(0, 99))
def test_an_item_is_refused_only_if_nobody_has_room_and_the_hint_is_exact(
    sets: list[tuple[GraphView, ...]], loads_ms: list[float], num_excluded: int, seed: int
) -> None:
    workers = pool_of(sets, loads_ms)
    excluded = {worker.incarnation for worker in workers[:num_excluded]}
    allowed = workers[num_excluded:]
    costs_ms = {worker.worker_id: worker.costs.quote(GRIDS).cost_ms for worker in allowed}
    before_ms = {worker.worker_id: worker.in_flight_ms for worker in workers}
    choice = choose(*workers, exclude=tuple(excluded), rng=random.Random(seed))
    after_ms = {worker.worker_id: worker.in_flight_ms for worker in workers}
    if isinstance(choice, Refusal):
        assert after_ms == before_ms
        assert all(worker.wait_ms(costs_ms[worker.worker_id]) > 0 for worker in allowed)
        assert choice.saturated == bool(allowed)
        waits_ms = [worker.in_flight_ms + costs_ms[worker.worker_id] - worker.max_queue_ms for worker in allowed]
        assert choice.retry_ms == pytest.approx(min(waits_ms, default=200.0))
    else:
        worker = choice.worker
        assert worker in allowed
        assert after_ms == before_ms | {worker.worker_id: before_ms[worker.worker_id] + choice.cost_ms}
        worker.in_flight_ms -= choice.cost_ms
        assert worker.wait_ms(choice.cost_ms) == 0
        assert choice.grant == (worker.worker_id, worker.incarnation, choice.grant[2], choice.cost_ms)


@given(sets=GRAPH_SETS, loads_ms=LOADS_MS)
def test_groups_hold_each_worker_once_and_know_their_least_cost(
    sets: list[tuple[GraphView, ...]], loads_ms: list[float]
) -> None:
    workers = pool_of(sets, loads_ms)
    plan = index(*workers).plan(GRIDS)
    seats = [seat for group in plan.groups for seat in group.seats()]
    assert sorted(seat.worker.worker_id for seat in seats) == sorted(worker.worker_id for worker in workers)
    for group in plan.groups:
        assert group.floor_ms == pytest.approx(min(seat.cost_ms for seat in group.seats()))


def test_who_comes_or_goes_is_priced_or_forgotten_and_nobody_else_again() -> None:
    workers = pool_of([(graph(cost_ms=10.0 + number),) for number in range(8)], [0.0] * 8)
    known = index(*workers)

    def seats() -> dict[str, Seat]:
        return {seat.worker.worker_id: seat for group in known.plan(GRIDS).groups for seat in group.seats()}

    before, gone = seats(), workers[3]
    known.remove(gone)
    assert seats() == {name: seat for name, seat in before.items() if name != gone.worker_id}
    known.add(gone)
    again = seats()
    assert again.pop(gone.worker_id) is not before.pop(gone.worker_id)
    assert again == before


@settings(max_examples=40, deadline=None)
@given(
    sets=GRAPH_SETS,
    seed=st.integers(0, 99),
    num_items=st.integers(100, 400),
    call=st.sampled_from([1, 16, 400]),
)
def test_a_burst_ends_about_as_early_as_with_a_look_at_every_worker_and_starves_nobody(
    sets: list[tuple[GraphView, ...]], seed: int, num_items: int, call: int
) -> None:
    rng = random.Random(seed)
    shapes = [((1, height, 10),) * number for height in (4, 10, 20) for number in range(1, 5)]
    items = rng.choices(shapes, k=num_items)
    ends_ms = {}
    for by_scan in (False, True):
        workers = pool_of(sets, [0.0] * len(sets))
        for worker in workers:
            worker.max_queue_ms = 1e9
        made = index(*workers, rng=random.Random(seed))
        for start in range(0, num_items, call):
            plans = {grids: made.plan(grids) for grids in shapes}
            if by_scan:
                for grids in items[start : start + call]:
                    seat = scan(plans[grids], (), 0, False)
                    assert isinstance(seat, Seat)
                    seat.worker.in_flight_ms += seat.cost_ms
            else:
                assert not assign([(plans[grids], 0, (), 0) for grids in items[start : start + call]])[1]
        ends_ms[by_scan] = max(worker.in_flight_ms for worker in workers)
        if num_items >= 10 * len(workers):
            assert min(worker.in_flight_ms for worker in workers) > 0
    dearest_ms = max(worker.costs.quote(grids).cost_ms for worker in workers for grids in items)
    assert ends_ms[False] <= 1.15 * ends_ms[True] + dearest_ms


def test_every_holder_gets_its_share_of_equal_work() -> None:
    workers = [view(f"w{number}", graph(cost_ms=8)) for number in range(50)]
    plan = index(*workers).plan(GRIDS)
    for _ in range(3000):
        assert isinstance(assign_one(plan), Seat)
    loads = [worker.in_flight_ms for worker in workers]
    assert max(loads) - min(loads) < 5


def test_requests_and_answers_travel_in_order() -> None:
    requests = [
        LeaseRequest(shape=shape(1)),
        LeaseRequest(shape=shape(2), exclude={"w/0"}),
        LeaseRequest(shape=shape(1)),
    ]
    assert pack(requests) == Ask([GRIDS, GRIDS * 2], [0, 1, 0], [0, 0, 0], {1: frozenset({"w/0"})}, [])
    refusal = Refusal(saturated=True, retry_ms=1.0, message="full")
    assert unpack(Answer(7, [("a", "a/0", None, 2.0), refusal])) == [Lease(7, "a", "a/0", None, 2.0), refusal]


# --- Router: the memory ----------------------------------------------------------------------------------------------


def router(clock: Clock | None = None) -> Router:
    return Router(
        fake_adapter(),
        lease_timeout_s=60,
        silent_timeout_s=15,
        now_s=clock or Clock(),
        rng=random.Random(0),
    )


def lease(router: Router, **request: object) -> Lease:
    (answer,) = router.assign([LeaseRequest(shape=shape(), **request)])  # type: ignore[arg-type]
    assert isinstance(answer, Lease), answer
    return answer


def beat(worker_id: str, *settled: int, incarnation: str | None = None) -> Beat:
    return Beat(
        worker_id=worker_id,
        incarnation=incarnation or f"{worker_id}/0",
        state=WorkerState.READY,
        settled=settled,
    )


def in_flight(router: Router) -> dict[str, float]:
    return {member.worker_id: member.in_flight_ms for member in router.members()}


def test_a_batch_spreads_over_the_pool_in_units_of_cost() -> None:
    pool = router()
    pool.register(report("fast", graphs=(graph(cost_ms=8),), max_queue_ms=1000))
    pool.register(report("slow", graphs=(graph(cost_ms=24),), max_queue_ms=1000))
    answers = pool.assign([LeaseRequest(shape=shape())] * 40)
    shares = Counter(answer.worker_id for answer in answers if isinstance(answer, Lease))
    assert shares["fast"] == pytest.approx(30, abs=1)


def test_settled_leases_give_their_cost_back_once() -> None:
    pool = router()
    pool.register(report("w"))
    first, second = lease(pool), lease(pool)
    assert in_flight(pool)["w"] == first.cost_ms + second.cost_ms
    assert pool.beat(beat("w", first.lease_id, first.lease_id))
    assert in_flight(pool)["w"] == second.cost_ms


def test_leases_expire() -> None:
    clock = Clock()
    pool = router(clock)
    pool.register(report("w"))
    lease(pool)
    clock.now += 61
    assert in_flight(pool)["w"] == 0


def test_a_full_pool_refuses_the_rest_of_a_batch() -> None:
    pool = router()
    pool.register(report("w", graphs=(graph(2, cost_ms=40),), max_queue_ms=100))
    answers = pool.assign([LeaseRequest(shape=shape())] * 3)
    assert [isinstance(answer, Lease) for answer in answers] == [True, True, False]
    assert "retry in 20 ms" in answers[2].message  # type: ignore[union-attr]


def test_a_suspect_gets_no_leases_until_it_is_heard_again() -> None:
    clock = Clock()
    pool = router(clock)
    pool.register(report("w"))
    lease(pool)
    pool.suspect("w/0")
    assert in_flight(pool)["w"] == 0
    pool.beat(beat("w"))  # may have been under way when it died
    (answer,) = pool.assign([LeaseRequest(shape=shape())])
    assert isinstance(answer, Refusal)
    clock.now += 2
    (answer,) = pool.assign([LeaseRequest(shape=shape())])
    assert isinstance(answer, Lease)


def test_a_restarted_worker_starts_empty_and_gets_leases_at_once() -> None:
    pool = router()
    pool.register(report("w"))
    old = lease(pool)
    pool.suspect("w/0")
    pool.register(report("w", incarnation="w/1"))
    new = lease(pool, exclude=frozenset({"w/0"}))
    assert new.incarnation == "w/1"
    assert pool.beat(beat("w", old.lease_id, incarnation="w/1"))
    assert in_flight(pool)["w"] == new.cost_ms


def test_suspicion_of_an_old_incarnation_leaves_the_new_one_alone() -> None:
    pool = router()
    pool.register(report("w", incarnation="w/1"))
    pool.suspect("w/0")
    assert lease(pool).incarnation == "w/1"


@pytest.mark.parametrize("state", [WorkerState.DRAINING, WorkerState.FAILED, WorkerState.CLOSED])
def test_only_ready_workers_get_leases(state: WorkerState) -> None:
    pool = router()
    pool.register(report("w", state=state, error=ErrorNote(name="ConfigError", message="no")))
    (answer,) = pool.assign([LeaseRequest(shape=shape())])
    assert isinstance(answer, Refusal)


def test_a_worker_that_registers_often_is_still_checked_once_a_time() -> None:
    """Costs that move register a worker anew: over weeks its checks for silence must not pile up."""
    clock = Clock()
    made = router(clock)
    for _ in range(200):
        made.register(report("w"))
        clock.now += 5
        made.assign([])
    assert len(made.roster._checks) <= 4
    clock.now += 20
    assert isinstance(made.assign([LeaseRequest(shape=shape())])[0], Refusal)


def test_a_silent_worker_gets_no_leases() -> None:
    clock = Clock()
    pool = router(clock)
    pool.register(report("w"))
    clock.now += 16
    (answer,) = pool.assign([LeaseRequest(shape=shape())])
    assert isinstance(answer, Refusal)
    pool.beat(beat("w"))
    lease(pool)


def test_a_router_that_lost_its_memory_asks_workers_to_register() -> None:
    pool = router()
    assert not pool.beat(beat("w", 7))
    pool.register(report("w"))
    assert pool.beat(beat("w"))


def test_a_worker_that_drops_a_graph_keeps_its_leases() -> None:
    pool = router()
    pool.register(report("w"))
    held = lease(pool)
    pool.register(report("w", graphs=()))
    assert in_flight(pool)["w"] == held.cost_ms
    pool.beat(beat("w", held.lease_id))
    assert in_flight(pool)["w"] == 0


# --- traffic ----------------------------------------------------------------------------------------------------------


def seen(router: Router, model: str = "") -> dict[tuple[Grid, ...], float]:
    return TrafficHistogram.from_bytes(router.traffic(model), now_s=router._now_s).counts()


def test_what_got_a_lease_is_counted_by_shape_and_what_was_refused_is_not() -> None:
    pool = router()
    pool.register(report("w", graphs=(graph(2, cost_ms=40),), max_queue_ms=100))
    pool.assign([LeaseRequest(shape=shape())] * 3)
    pool.register(report("v", max_queue_ms=1e6))  # plans are made anew: counts stay
    pool.assign([LeaseRequest(shape=shape(2)), LeaseRequest(shape=shape())])
    assert seen(pool) == {GRIDS: 3, GRIDS * 2: 1}


def test_a_trace_begins_with_the_first_fetch_and_ends_when_nobody_fetches() -> None:
    clock = Clock()
    pool = router(clock)
    pool.register(report("w"))
    item = TracedItem(time_s=1.0, model="fake", grids=GRIDS, graphs=("g",), misses=(), ms=3.0)
    told = replace(beat("w"), traced=(item,))
    assert pool.beat(told) is Heard.KNOWN
    assert pool.take_trace("recorder") == ()
    assert pool.beat(told) is Heard.TRACING
    assert pool.take_trace("recorder") == (item,)
    clock.now += 20
    assert pool.beat(told) is Heard.KNOWN
    assert pool.take_trace("recorder") == ()


def test_recorders_at_the_same_time_get_every_item_each_and_one_that_goes_ends_no_other() -> None:
    clock = Clock()
    pool = router(clock)
    pool.register(report("w"))
    first, second, third = (
        TracedItem(time_s=time_s, model="fake", grids=GRIDS, graphs=("g",), misses=(), ms=3.0) for time_s in (1, 2, 3)
    )
    pool.take_trace("one")
    pool.beat(replace(beat("w"), traced=(first,)))
    assert pool.take_trace("other") == ()  # from now on
    pool.beat(replace(beat("w"), traced=(second,)))
    assert pool.take_trace("other") == (second,)
    clock.now += 10
    assert pool.take_trace("one") == (first, second)
    clock.now += 10
    assert pool.beat(replace(beat("w"), traced=(third,))) is Heard.TRACING
    assert pool.take_trace("one") == (third,)
    assert pool.take_trace("other") == ()


def test_each_model_has_traffic_and_workers_of_its_own_and_one_trace_has_all() -> None:
    pool = Router(
        fake_adapter(), others={"other": fake_adapter()}, lease_timeout_s=60, silent_timeout_s=15, now_s=Clock()
    )
    assert pool.take_trace("recorder") == ()
    for worker_id, model in (("w", "fake"), ("v", "other")):
        pool.register(report(worker_id, model=model))
        item = TracedItem(time_s=1.0, model=model, grids=GRIDS, graphs=(), misses=(), ms=3.0)
        assert pool.beat(replace(beat(worker_id), traced=(item,))) is Heard.TRACING
    pool.lease(pack([LeaseRequest(shape=shape())] * 2))
    pool.lease(pack([LeaseRequest(shape=shape(2))], model="other"))
    assert (pool.worker_ids(), pool.worker_ids(""), pool.worker_ids("other")) == (["w", "v"], ["w"], ["v"])
    assert (seen(pool), seen(pool, "other")) == ({GRIDS: 2}, {GRIDS * 2: 1})
    assert [one.model for one in pool.take_trace("recorder")] == ["fake", "other"]


# --- fairness ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_queue_ms", [1e9, 30.0])
def test_many_clients_of_one_item_each_are_served_alike_and_load_equal_workers_alike(max_queue_ms: float) -> None:
    """48 clients, each with one item under way, on 6 workers that take 10 ms an item; with and without a full pool."""
    clock, rng = Clock(), random.Random(0)
    pool = router(clock)
    for number in range(6):
        pool.register(report(f"w{number}", graphs=(graph(2, cost_ms=10),), max_queue_ms=max_queue_ms))
    free_s = dict.fromkeys([f"w{number}" for number in range(6)], clock.now)
    done: Counter[int] = Counter()
    loads: Counter[str] = Counter()
    events: list[tuple[float, float, int, Lease | None]] = [(clock.now, rng.random(), n, None) for n in range(48)]
    until_s = clock.now + 5
    while events[0][0] < until_s:
        clock.now, _, client, ended = heappop(events)
        if ended is not None:
            pool.beat(beat(ended.worker_id, ended.lease_id))
            done[client] += 1
            loads[ended.worker_id] += 1
        (answer,) = pool.assign([LeaseRequest(shape=shape())])
        if isinstance(answer, Lease):
            free_s[answer.worker_id] = max(clock.now, free_s[answer.worker_id]) + 0.01
            heappush(events, (free_s[answer.worker_id], rng.random(), client, answer))
        else:
            later_s = clock.now + max(0.01, answer.retry_ms / 1e3) * rng.uniform(0.9, 1.1)
            heappush(events, (later_s, rng.random(), client, None))
    assert done.total() > 0.95 * 6 * 5 / 0.01
    assert max(loads.values()) < 1.02 * min(loads.values())
    assert min(done.values()) > 0.8 * max(done.values())


def test_no_client_that_saturates_a_pool_keeps_others_out_of_it() -> None:
    """24 streams that could fill the worker alone, and 8 clients of one item each; the worker takes 20 ms an item."""
    clock, rng = Clock(), random.Random(0)
    pool = router(clock)
    pool.register(report("w", graphs=(graph(2, cost_ms=20),), max_queue_ms=2000.0))
    wants = {f"stream {number}": 128 for number in range(24)} | {f"single {number}": 1 for number in range(8)}
    started_s = free_s = clock.now
    done, num_open = Counter[str](), Counter[str]()
    asked_s, slowest_s = dict.fromkeys(wants, clock.now), Counter[str]()  # since when it gets nothing, and the longest
    come_back = set(wants)  # that will ask again
    events: list[tuple[float, float, str, Lease | None]] = [(clock.now, rng.random(), name, None) for name in wants]
    while clock.now < started_s + 30:
        clock.now, _, client, ended = heappop(events)
        if ended is None:
            come_back.discard(client)
        else:
            pool.beat(beat("w", ended.lease_id))
            done[client] += 1
            num_open[client] -= 1
        answers = pool.assign([LeaseRequest(shape=shape())] * (wants[client] - num_open[client]), client=client)
        for answer in answers:
            if isinstance(answer, Lease):
                slowest_s[client] = max(slowest_s[client], clock.now - asked_s[client])
                asked_s[client] = free_s = max(clock.now, free_s) + 0.02
                num_open[client] += 1
                heappush(events, (free_s, rng.random(), client, answer))
            elif client not in come_back:
                come_back.add(client)
                retry_s = min(0.5, max(0.01, answer.retry_ms / 1e3)) * rng.uniform(0.9, 1.1)
                heappush(events, (clock.now + retry_s, rng.random(), client, None))
    assert done.total() > 0.97 * 30 / 0.02
    for kind in ("stream", "single"):
        alike = sorted(done[client] for client in wants if client.startswith(kind))
        assert alike[0] > 0.4 * alike[len(alike) // 2]
    assert max(slowest_s.values()) < 3  # the queue is two seconds long


def test_what_one_client_leaves_of_its_share_is_for_the_others() -> None:
    pool = router(clock := Clock())
    pool.register(report("w", graphs=(graph(2, cost_ms=100),), max_queue_ms=1000.0))

    def granted(client: str) -> list[int]:
        answers = pool.assign([LeaseRequest(shape=shape())] * 30, client=client)
        return [answer.lease_id for answer in answers if isinstance(answer, Lease)]

    early = granted("early")
    assert (len(early), granted("late")) == (10, [])
    pool.beat(beat("w", *early[:6]))
    assert len(granted("early")) == 1  # half of what the full pool held is five
    late = granted("late")
    assert len(late) == 5
    pool.beat(beat("w", *late))
    (refusal,) = pool.assign([LeaseRequest(shape=shape())], client="early")
    assert isinstance(refusal, Refusal)
    assert "this client has its part" in refusal.message  # the worker is not full now
    assert granted("early") == []
    clock.now += 5  # the late one wants nothing more
    assert len(granted("early")) == 5


def test_clients_that_ask_once_and_vanish_leave_no_worker_idle() -> None:
    pool = router()
    pool.register(report("w", graphs=(graph(2, cost_ms=100),), max_queue_ms=2000.0))
    asked = [LeaseRequest(shape=shape())] * 20
    leases = [answer for answer in pool.assign(asked, client="stream") if isinstance(answer, Lease)]
    for number in range(64):
        assert isinstance(pool.assign(asked[:1], client=f"short-lived {number}")[0], Refusal)
    pool.beat(beat("w", *(lease.lease_id for lease in leases[1:])))
    answers = pool.assign(asked, client="stream")
    assert sum(isinstance(answer, Lease) for answer in answers) == 2
    assert answers[-1].retry_ms >= 100  # type: ignore[union-attr]


def test_a_worker_that_dies_takes_nothing_of_its_clients_shares_along() -> None:
    pool = router()
    for name in "ab":
        pool.register(report(name, graphs=(graph(2, cost_ms=100),), max_queue_ms=1000.0))
    asked = [LeaseRequest(shape=shape())] * 20
    leases = [answer for answer in pool.assign(asked, client="one") if isinstance(answer, Lease)]
    assert len(leases) == 20
    assert all(isinstance(answer, Refusal) for answer in pool.assign(asked, client="other"))
    pool.suspect("a/0")
    pool.beat(beat("b", *(lease.lease_id for lease in leases if lease.worker_id == "b")))
    assert sum(isinstance(answer, Lease) for answer in pool.assign(asked, client="one")) == 10


def test_the_leases_are_looked_through_for_the_first_who_finds_a_worker_dead_and_not_for_the_others() -> None:
    class Leases(dict[int, Any]):
        num_looks = 0

        def items(self) -> Any:
            self.num_looks += 1
            return super().items()

    pool = router()
    pool._ledger._leases = leases = Leases()
    pool.register(report("w"))
    lease(pool)
    for _ in range(64):
        pool.suspect("w/0")
    assert (len(leases), leases.num_looks) == (0, 1)


@dataclass(frozen=True)
class Held:
    """A lease as the history knows it."""

    worker_id: str
    cost_ms: float
    num_bytes: int
    urgent: bool
    client: str
    until_s: float


NO = Held("", 0.0, 0, False, "", 0.0)


# --- several models --------------------------------------------------------------------------------------------------


def test_items_go_to_workers_with_their_model() -> None:
    pool = Router(
        fake_adapter(),
        others={"other": fake_adapter()},
        lease_timeout_s=60,
        silent_timeout_s=15,
        now_s=Clock(),
        rng=random.Random(0),
    )
    pool.register(report("first", model="fake"))
    pool.register(report("second", model="other", graphs=(graph(cost_ms=80),)))
    for model, worker_id in (("", "first"), ("fake", "first"), ("other", "second")):
        (answer,) = unpack(pool.lease(pack([LeaseRequest(shape=shape())], model=model)))
        assert isinstance(answer, Lease)
        assert answer.worker_id == worker_id
    pool.suspect("second/0")
    (answer,) = unpack(pool.lease(pack([LeaseRequest(shape=shape())], model="other")))
    assert answer == Refusal(saturated=False, retry_ms=200.0, message="no worker is up that may take it")
    assert [(member.model, member.leasable) for member in pool.members()] == [("fake", True), ("other", False)]


def test_a_router_process_never_collects_what_it_has_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # it sets this itself: afterwards it is as it was
    timeouts = {"lease_timeout_s": 60.0, "silent_timeout_s": 15.0, "client_timeout_s": 10.0}
    try:
        RouterActor([EncoderConfig(model="tiny-minicpmv-2.6")], **timeouts)
        assert gc.get_freeze_count() > 10_000
    finally:
        gc.unfreeze()


class RouterHistory(RuleBasedStateMachine):
    """Whatever happens in whatever order, each worker's cost in flight is that of the leases it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.router = router(self.clock)
        self.incarnations: dict[str, int] = {}
        self.held: dict[int, Held] = {}  # by lease
        self.draining: set[str] = set()
        self.leaving: set[str] = set()
        self.number = 0

    @rule(name=st.sampled_from("abc"), cost_ms=st.floats(1, 30))
    def restart(self, name: str, cost_ms: float) -> None:
        self.number += 1
        self.incarnations[name] = self.number
        self.held = {key: lease for key, lease in self.held.items() if lease.worker_id != name}
        self.draining.discard(name)
        self.router.register(
            report(name, incarnation=f"{name}/{self.incarnations[name]}", graphs=(graph(cost_ms=cost_ms),))
        )

    @precondition(lambda self: self.incarnations)
    @rule(data=st.data(), longest=st.sampled_from([50, 10_000]))
    def hold_other_graphs(self, data: st.DataObject, longest: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.incarnations)))
        self.draining.discard(name)
        self.router.register(
            report(name, incarnation=f"{name}/{self.incarnations[name]}", graphs=(graph(longest=longest),))
        )

    @precondition(lambda self: self.incarnations)
    @rule(data=st.data(), drains=st.booleans())
    def drain(self, data: st.DataObject, drains: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.incarnations)))
        (self.draining.add if drains else self.draining.discard)(name)
        self.tell(name)

    def tell(self, name: str, *settled: int) -> None:
        state = WorkerState.DRAINING if name in self.draining else WorkerState.READY
        incarnation = f"{name}/{self.incarnations[name]}"
        self.router.beat(Beat(worker_id=name, incarnation=incarnation, state=state, settled=settled))

    @precondition(lambda self: self.incarnations)
    @rule(data=st.data())
    def stop_leases(self, data: st.DataObject) -> None:
        """The pool takes a worker away; it goes on reporting that it is ready."""
        name = data.draw(st.sampled_from(sorted(self.incarnations)))
        self.leaving.add(name)
        self.router.drain(name)

    @precondition(lambda self: self.incarnations)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.incarnations)))
        self.router.forget(name)
        del self.incarnations[name]
        self.draining.discard(name)
        self.leaving.discard(name)
        self.held = {key: lease for key, lease in self.held.items() if lease.worker_id != name}

    @rule(
        num_items=st.integers(1, 8),
        num_segments=st.integers(1, 9),
        excluded=st.sampled_from(["", "a", "b"]),
        num_bytes=st.sampled_from([0, 10, 400]),
        priority=st.sampled_from(Priority),
        client=st.sampled_from(["", "one", "other"]),
    )
    def assign(
        self, num_items: int, num_segments: int, excluded: str, num_bytes: int, priority: Priority, client: str
    ) -> None:
        exclude = frozenset({f"{excluded}/{self.incarnations[excluded]}"} if excluded in self.incarnations else ())
        requests = [LeaseRequest(shape=shape(num_segments), num_bytes=num_bytes, exclude=exclude)] * num_items
        for answer in self.router.assign(requests, priority=priority, client=client):
            if isinstance(answer, Lease):
                assert answer.worker_id not in self.draining | self.leaving
                assert answer.incarnation not in exclude
                assert answer.lease_id not in self.held
                now = self.router.roster.views[answer.worker_id].costs.quote(shape(num_segments).grids)
                assert (answer.cost_ms, answer.graph) == (now.cost_ms, None if now.key is None else str(now.key))
                assert answer.incarnation == f"{answer.worker_id}/{self.incarnations[answer.worker_id]}"
                self.held[answer.lease_id] = Held(
                    answer.worker_id,
                    answer.cost_ms,
                    num_bytes,
                    priority is Priority.INTERACTIVE,
                    client,
                    self.clock.now + 60,
                )

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.held)))
        name = self.held.pop(lease_id).worker_id
        self.tell(name, lease_id)

    @rule(seconds=st.one_of(st.floats(0, 9), st.floats(12, 40)), speaks=st.sampled_from(["", "one", "other"]))
    def wait(self, seconds: float, speaks: str) -> None:
        for client in ("one", "other"):
            self.router.hello(client)
        self.clock.now += seconds
        if speaks:
            self.router.hello(speaks)
        self.held = {
            key: lease
            for key, lease in self.held.items()
            if lease.until_s > self.clock.now and (seconds < 10 or lease.client in ("", speaks))
        }

    @precondition(lambda self: self.incarnations)
    @rule(data=st.data())
    def suspect(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.incarnations)))
        self.router.suspect(f"{name}/{self.incarnations[name]}")
        self.held = {key: lease for key, lease in self.held.items() if lease.worker_id != name}
        answers = self.router.assign([LeaseRequest(shape=shape())] * 4)
        for answer in answers:
            assert not isinstance(answer, Lease) or answer.worker_id != name
        self.router.release([answer.lease_id for answer in answers if isinstance(answer, Lease)])

    @invariant()
    def costs_add_up(self) -> None:
        expected = dict.fromkeys(self.incarnations, 0.0)
        num_bytes = dict.fromkeys(self.incarnations, 0)
        urgent_ms = dict.fromkeys(self.incarnations, 0.0)
        for lease in self.held.values():
            expected[lease.worker_id] += lease.cost_ms
            num_bytes[lease.worker_id] += lease.num_bytes
            urgent_ms[lease.worker_id] += lease.cost_ms * lease.urgent
        assert in_flight(self.router) == pytest.approx(expected, abs=1e-6)
        assert {member.worker_id: member.in_flight_bytes for member in self.router.members()} == num_bytes
        views = self.router.roster.views
        assert {name: view.urgent_ms for name, view in views.items()} == pytest.approx(urgent_ms, abs=1e-6)

    @invariant()
    def accounts_add_up(self) -> None:
        self.router.expire()
        for priority, shares in self.router.roster.desk("").shares.items():
            held_ms = dict.fromkeys(shares._accounts, 0.0)
            for lease in self.held.values():
                if lease.urgent == (priority is Priority.INTERACTIVE):
                    held_ms[lease.client] += lease.cost_ms
            accounts = {client: account.held_ms for client, account in shares._accounts.items()}
            assert accounts == pytest.approx(held_ms, abs=1e-6)

    @invariant()
    def queues_are_bounded(self) -> None:
        for view in self.router.roster.views.values():
            part, most = (
                (1 + GUARANTEED) * view.max_queue_ms,
                max(lease.cost_ms for lease in self.held.values() or [NO]),
            )
            assert view.in_flight_ms <= part + 2 * most


TestRouterHistory = RouterHistory.TestCase
TestRouterHistory.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
