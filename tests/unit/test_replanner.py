"""A pool that follows its traffic: when it changes graphs, in which order, and when it leaves them alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from fakes import Clock, report

from cluster.planning.histogram import TrafficHistogram
from cluster.planning.replan_config import ReplanConfig
from cluster.planning.replanner import Replanner
from cluster.planning.replanning import Replanning
from cluster.planning.survey import item_sizes, survey
from encoder.adapters.base import EncoderAdapter
from encoder.adapters.registry import load_adapter
from encoder.config import EncoderConfig
from encoder.packing import GraphView
from encoder.types import GraphKey
from workers.messages import GraphChange, WorkerReport, WorkerState

ENCODER = EncoderConfig(model="tiny-minicpmv-2.6")
ADAPTER: EncoderAdapter = load_adapter(ENCODER)
LOCAL = f"{ADAPTER.encoder}@bfloat16"
SINGLE, LARGE = ((1, 32, 32),), ((1, 32, 32),) * 9  # items of 64 and of 576 tokens
MIB = 1 << 20
Kinds = dict[tuple[tuple[int, int, int], ...], float]


def view(budget: int, *, speed: float = 1.0) -> GraphView:
    key = GraphKey(encoder=LOCAL, path=ADAPTER.path, axis_keys=("packed",), token_budget=budget)
    room = ADAPTER.capacity(key.axis_keys, budget)
    cost_ms = (5.0 + 0.002 * room.patches) / speed
    return GraphView(key=key, capacity=room, cost_ms=cost_ms, num_bytes=room.patches << 10, shared_bytes=MIB)


@dataclass
class SimulatedFleet:
    """Workers that need three looks to change, and a router that has seen one kind of items."""

    held: dict[str, tuple[int, ...]]
    clock: Clock
    kinds: Kinds
    limit_bytes: int = 1 << 40
    eager_base_ms: float = 5.0
    eager_measured: bool = True
    speeds: dict[str, float] = field(default_factory=dict)
    broken_budgets: set[int] = field(default_factory=set)
    states: dict[str, WorkerState] = field(default_factory=dict)
    lives: dict[str, int] = field(default_factory=dict)
    changes: dict[str, GraphChange] = field(default_factory=dict)
    looks: dict[str, int] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)

    def reports(self) -> Sequence[WorkerReport] | None:
        return [self._report(worker_id) for worker_id in self.held]

    def report(self, worker_id: str) -> WorkerReport | None:
        self.looks[worker_id] = self.looks.get(worker_id, 0) + 1
        change = self.changes.get(worker_id)
        if change is not None and not change.done and self.looks[worker_id] >= 3:
            failed = tuple((key, "no memory") for key in change.wanted if key.token_budget in self.broken_budgets)
            self.held[worker_id] = tuple(key.token_budget for key in change.wanted if key not in dict(failed))
            self.changes[worker_id] = replace(change, done=True, failed=failed)
            self.log.append(f"{worker_id} done")
        return self._report(worker_id)

    def _report(self, worker_id: str) -> WorkerReport:
        speed = self.speeds.get(worker_id, 1.0)
        views = tuple(view(budget, speed=speed) for budget in self.held[worker_id])
        return report(
            worker_id,
            incarnation=f"{worker_id}/{self.lives.get(worker_id, 0)}",
            state=self.states.get(worker_id, WorkerState.READY),
            graphs=views,
            known_graphs=views,
            encoder=LOCAL,
            device="cuda:0",
            eager_ms_per_patch=0.0025 / speed,
            eager_base_ms=self.eager_base_ms / speed,
            eager_measured=self.eager_measured,
            graph_limit_bytes=self.limit_bytes,
            graph_change=self.changes.get(worker_id),
            capture_ms=200.0,
        )

    def traffic(self) -> TrafficHistogram | None:
        histogram = TrafficHistogram(now_s=self.clock)
        histogram.count(self.kinds)
        self.clock.now += 100
        return histogram

    def apply(self, worker_id: str, keys: tuple[GraphKey, ...]) -> None:
        self.looks[worker_id] = 0
        self.changes[worker_id] = GraphChange(wanted=keys, done=False, failed=())
        self.log.append(f"{worker_id} begins")


def replanner(fleet: SimulatedFleet, **changes: object) -> Replanner:
    config = ReplanConfig.model_validate({"interval_s": 60, **changes})
    return Replanner(fleet, ADAPTER, ENCODER, config, now_s=fleet.clock, start=lambda work: work())


def fleet_of(*held: Sequence[int], kinds: Kinds | None = None, names: str = "w", **changes: Any) -> SimulatedFleet:
    sets = {f"{names}{number}": tuple(budgets) for number, budgets in enumerate(held)}
    return SimulatedFleet(sets, changes.pop("clock", None) or Clock(), kinds or {LARGE: 2000.0}, **changes)


def run(made: Replanner, fleet: SimulatedFleet, until: Callable[[], bool], num_ticks: int = 60) -> None:
    fleet.clock.now += 61
    for _ in range(num_ticks):
        made.tick()
        if until():
            return
    raise AssertionError(made.note)


def rests(made: Replanner) -> Callable[[], bool]:
    return lambda: made._planning is None and made._change is None and not made._queue


def test_a_pool_captures_what_its_traffic_needs_on_one_worker_after_the_other() -> None:
    fleet = fleet_of([64, 128], [64, 128])
    made = replanner(fleet)
    made.tick()
    assert fleet.log == []  # not yet: it looks after the interval
    run(made, fleet, lambda: made.num_changes == 2)
    assert fleet.log == ["w0 begins", "w0 done", "w1 begins", "w1 done"]
    assert all(max(budgets) >= 576 for budgets in fleet.held.values())
    assert all(64 in budgets for budgets in fleet.held.values())  # there is memory to keep it


def test_two_models_of_a_pool_never_change_workers_at_the_same_time() -> None:
    first = fleet_of([64, 128], [64, 128])
    second = fleet_of([64, 128], clock=first.clock, log=first.log, names="v")
    pool = Replanning([replanner(first), replanner(second)])
    first.clock.now += 61
    for _ in range(60):
        pool.tick()
    assert [one.num_changes for one in pool.decisions()] == [2, 1]
    at_once = {
        ("w0 begins", "w0 done", "w1 begins", "w1 done", "v0 begins", "v0 done"),
        ("v0 begins", "v0 done", "w0 begins", "w0 done", "w1 begins", "w1 done"),
    }
    assert tuple(first.log) in at_once
    assert max(first.held["w0"]) >= 576 <= max(second.held["v0"])


def test_the_last_decision_says_what_was_done_and_when_it_looks_again() -> None:
    fleet = fleet_of([64, 128], [64, 128])
    made = replanner(fleet)
    assert made.decision().note == "not looked at yet"
    assert made.decision().next_look_s == 60
    run(made, fleet, lambda: made.is_changing)
    decision = made.decision()
    assert decision.note.startswith("changing 2 workers to capture image[packed]/")
    assert "576 on 2" in decision.note
    assert decision.note.endswith(" less GPU time predicted")
    assert (decision.model, decision.next_look_s, decision.num_changes) == (ENCODER.model, None, 0)
    run(made, fleet, lambda: not made.is_changing)
    fleet.clock.now += 20
    decision = made.decision()
    assert decision.note.startswith("changed 2 workers to capture image[packed]/")
    assert (decision.age_s, decision.next_look_s, decision.num_changes) == (20, 40, 2)


def test_a_model_without_workers_is_told_from_workers_that_do_not_answer() -> None:
    fleet = fleet_of()
    made = replanner(fleet)
    run(made, fleet, lambda: made.note == "no worker is there")
    fleet.reports = lambda: None  # type: ignore[method-assign]
    run(made, fleet, lambda: made.note == "workers or the router did not answer")


def test_traffic_that_stays_as_it_is_changes_nothing_more() -> None:
    fleet = fleet_of([64, 128], [64, 128])
    made = replanner(fleet)
    run(made, fleet, lambda: made.num_changes == 2)
    for _ in range(3):
        run(made, fleet, rests(made))
        fleet.clock.now += 61
        made.tick()
        made.tick()
    assert len(fleet.log) == 4
    assert made.note.startswith("kept")


def test_workers_that_never_measured_eager_runs_are_given_the_graph_that_fits() -> None:
    """By a cheap guess all their items seem to run eagerly; in truth they ride in a graph nine times too large."""
    fleet = fleet_of([576], kinds={SINGLE: 2000.0}, eager_base_ms=0.0)
    run(kept := replanner(fleet), fleet, lambda: kept.note.startswith("kept"))
    fleet.eager_measured = False
    run(made := replanner(fleet), fleet, lambda: made.num_changes == 1)
    assert 64 in fleet.held["w0"]


def test_what_does_not_fit_beside_the_planned_graphs_goes() -> None:
    small, large = view(64), view(576)
    fleet = fleet_of([64, 128], limit_bytes=int(1.05 * (large.num_bytes + small.num_bytes)) + MIB)
    made = replanner(fleet)
    run(made, fleet, lambda: made.num_changes == 1)
    assert sum(view(budget).num_bytes for budget in fleet.held["w0"]) + MIB <= fleet.limit_bytes


def test_a_capture_that_fails_stops_the_change_and_is_not_tried_again() -> None:
    fleet = fleet_of([64, 128], [64, 128], broken_budgets={576})
    made = replanner(fleet, interval_s=1)
    run(made, fleet, lambda: made.note.startswith("stopped"))
    assert "w0 could not capture 1 graphs" in made.note
    assert fleet.log == ["w0 begins", "w0 done"]
    fleet.broken_budgets.clear()
    run(made, fleet, lambda: "w1 begins" in fleet.log)
    assert 576 not in {key.token_budget for key in fleet.changes["w1"].wanted}


@pytest.mark.parametrize("trouble", ["state", "life", "late"])
def test_a_worker_in_trouble_stops_the_change(trouble: str) -> None:
    fleet = fleet_of([64, 128], [64, 128])
    made = replanner(fleet)
    run(made, fleet, lambda: "w0 begins" in fleet.log)
    if trouble == "state":
        fleet.states["w0"] = WorkerState.FAILED
    elif trouble == "life":
        fleet.lives["w0"] = 1
    else:
        fleet.clock.now += 301
    run(made, fleet, rests(made))
    assert made.note.startswith("stopped: w0")
    assert "w1 begins" not in fleet.log


@pytest.mark.parametrize(
    ("fleet", "changes", "note"),
    [
        (fleet_of([64], kinds={LARGE: 20.0}), {}, "too few items to plan for: 18 lately, min_items is 200"),
        (
            fleet_of([64, 128], [64, 128], states={"w1": WorkerState.DRAINING}),
            {},
            "not all workers are ready: w1 is draining",
        ),
        (fleet_of([64, 576], kinds={SINGLE: 2000.0}), {}, "kept"),
        (fleet_of([64]), {"min_gain": 0.99}, "kept"),
        (fleet_of([64], kinds={LARGE: 300.0}), {"horizon_s": 0.001}, "kept: the best plan would save "),
    ],
    ids=["few", "draining", "suits", "gain", "horizon"],
)
def test_nothing_changes_without_reason(fleet: SimulatedFleet, changes: dict[str, object], note: str) -> None:
    made = replanner(fleet, **changes)
    run(made, fleet, lambda: made.note.startswith(note))
    assert fleet.log == []


def test_workers_are_planned_for_at_their_own_speed_and_by_their_own_names() -> None:
    fleet = fleet_of([64, 128], [64, 128], speeds={"w1": 0.5})
    reports = list(fleet.reports() or ())
    reports[1] = replace(reports[1], encoder="other@float32")
    found = survey(reports, {LARGE: 3.0}, ADAPTER, ENCODER)
    assert [room.speed for room in found.rooms] == pytest.approx([1.0, 0.5])
    by_budget = {one.key.token_budget: one for one in found.candidates}
    assert by_budget[64].cost_ms == pytest.approx(view(64).cost_ms)
    assert by_budget[576].cost_ms == pytest.approx(view(576).cost_ms, rel=0.1)  # never captured: on their line
    assert {key.encoder for key in found.keys_of("w1", found.current["w1"])} == {"other@float32"}


def test_budgets_named_in_the_configuration_are_the_only_ones_offered() -> None:
    config = ENCODER.model_copy(update={"token_budgets": (64, 256)})
    found = survey(fleet_of([64]).reports() or (), {LARGE: 3.0}, ADAPTER, config)
    assert {one.key.token_budget for one in found.candidates} == {64, 256}


def test_rare_sizes_of_items_are_rounded_up_to_frequent_ones() -> None:
    kinds = {((1, 32, 32),) * n: 1000.0 - n for n in range(1, 50)}
    sizes = item_sizes(kinds, ADAPTER)
    assert len(sizes) == 32
    assert max(sizes) == 49 * 64
    assert sum(sizes.values()) == pytest.approx(sum(kinds.values()))


def test_a_graph_that_this_adapter_does_not_know_is_left_where_it_is() -> None:
    foreign = replace(view(64), key=replace(view(64).key, axis_keys=("24x43",)))
    (only,) = fleet_of([64, 128]).reports() or ()
    found = survey(
        [replace(only, graphs=(*only.graphs, foreign), known_graphs=(foreign,))], {LARGE: 3.0}, ADAPTER, ENCODER
    )
    assert found.keys_of("w0", found.wanted(found.plan())["w0"])[-1] == foreign.key


def test_workers_that_share_a_device_share_its_memory() -> None:
    reports = [fleet_of([64], limit_bytes=100, names=f"{group}-")._report(f"{group}-0") for group in ("half", "own")]
    found = survey(reports, {LARGE: 3.0}, ADAPTER, ENCODER, memory_shares={"half": 0.5})
    assert {room.worker_id: room.memory_bytes for room in found.rooms} == {"half-0": 50, "own-0": 100}
