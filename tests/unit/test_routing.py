"""Routing: who gets an item, and an account of work in flight that always adds up."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from fakes import TOKENS, Clock, fake_adapter, graph, report
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cluster.router import LeaseRequest, Router
from cluster.routing import Choice, Lease, Refusal, WorkerView, assign
from encoder.packing import GraphView
from encoder.types import ItemShape
from workers.costs import CostTable
from workers.messages import Beat, ErrorNote, WorkerState

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


def chosen(*workers: WorkerView, exclude: tuple[str, ...] = ()) -> str:
    choice = assign(GRIDS, workers, random.Random(0), exclude)
    assert isinstance(choice, Choice), choice
    return choice.worker.worker_id


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
    refusal = assign(GRIDS, [full], random.Random(0))
    assert refusal == Refusal(saturated=True, retry_ms=0.5, message="all 1 workers are full; retry in 0 ms")


def test_an_idle_worker_takes_an_item_of_any_cost() -> None:
    assert chosen(view("idle", eager_ms_per_patch=100)) == "idle"


def test_an_excluded_worker_gets_nothing() -> None:
    holder = view("holder", graph(cost_ms=8))
    assert chosen(holder, view("eager"), exclude=("holder/0",)) == "eager"
    refusal = assign(GRIDS, [holder], random.Random(0), {"holder/0"})
    assert isinstance(refusal, Refusal)
    assert not refusal.saturated


def test_there_is_a_second_choice() -> None:
    choice = assign(GRIDS, [view("eager"), view("holder", graph(cost_ms=8))], random.Random(0))
    assert isinstance(choice, Choice)
    assert choice.second is not None
    assert choice.second.worker_id == "eager"


def test_equals_are_drawn_by_lot() -> None:
    rng = random.Random(0)
    workers = [view(str(number), graph(cost_ms=8 + number / 100)) for number in range(4)]
    draws: Counter[str] = Counter()
    for _ in range(400):
        choice = assign(GRIDS, workers, rng)
        assert isinstance(choice, Choice)
        draws[choice.worker.worker_id] += 1
    assert min(draws.values()) > 60


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


class RouterHistory(RuleBasedStateMachine):
    """Whatever happens in whatever order, each worker's cost in flight is that of the leases it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.router = router(self.clock)
        self.incarnations: dict[str, int] = {}
        self.held: dict[int, tuple[str, float, float]] = {}  # lease: worker, cost, expiry

    @rule(name=st.sampled_from("abc"), cost_ms=st.floats(1, 30))
    def restart(self, name: str, cost_ms: float) -> None:
        self.incarnations[name] = self.incarnations.get(name, -1) + 1
        self.held = {key: lease for key, lease in self.held.items() if lease[0] != name}
        self.router.register(
            report(name, incarnation=f"{name}/{self.incarnations[name]}", graphs=(graph(cost_ms=cost_ms),))
        )

    @rule(num_items=st.integers(1, 8), num_segments=st.integers(1, 9))
    def assign(self, num_items: int, num_segments: int) -> None:
        for answer in self.router.assign([LeaseRequest(shape=shape(num_segments))] * num_items):
            if isinstance(answer, Lease):
                assert answer.lease_id not in self.held
                assert answer.incarnation == f"{answer.worker_id}/{self.incarnations[answer.worker_id]}"
                self.held[answer.lease_id] = (answer.worker_id, answer.cost_ms, self.clock.now + 60)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.held)))
        name = self.held.pop(lease_id)[0]
        self.router.beat(beat(name, lease_id, incarnation=f"{name}/{self.incarnations[name]}"))

    @rule(seconds=st.floats(0, 40))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds
        self.held = {key: lease for key, lease in self.held.items() if lease[2] > self.clock.now}

    @precondition(lambda self: self.incarnations)
    @rule(data=st.data())
    def suspect(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.incarnations)))
        self.router.suspect(f"{name}/{self.incarnations[name]}")
        self.held = {key: lease for key, lease in self.held.items() if lease[0] != name}
        answers = self.router.assign([LeaseRequest(shape=shape())] * 4)
        for answer in answers:
            assert not isinstance(answer, Lease) or answer.worker_id != name
        self.router.release([answer.lease_id for answer in answers if isinstance(answer, Lease)])

    @invariant()
    def costs_add_up(self) -> None:
        expected = dict.fromkeys(self.incarnations, 0.0)
        for name, cost_ms, _ in self.held.values():
            expected[name] += cost_ms
        assert in_flight(self.router) == pytest.approx(expected, abs=1e-6)


TestRouterHistory = RouterHistory.TestCase
TestRouterHistory.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
