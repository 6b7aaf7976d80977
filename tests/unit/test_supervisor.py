"""The life of workers under a supervisor: a real router, processes played by hand, a clock turned by hand. No Ray."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from fakes import Clock, fake_adapter, report, tiny_config
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cluster.config import PoolConfig
from cluster.groups import GroupConfig
from cluster.lifecycle.crew import Life, Sight
from cluster.lifecycle.nodes import check_total, settle_groups
from cluster.lifecycle.posts import GRACE_S, LEASES_S
from cluster.lifecycle.status import Stage
from cluster.lifecycle.supervisor import Supervisor
from cluster.planning.replan_config import ReplanConfig
from cluster.planning.replanner import Replanner
from cluster.planning.replanning import Replanning
from cluster.routing.leases import Lease, LeaseRequest
from cluster.routing.roster import Member
from cluster.routing.router import Router
from encoder.adapters.registry import load_adapter
from encoder.errors import ConfigError, PoolClosedError, WeightsError, WorkerStartError
from encoder.types import GraphKey, ItemShape
from workers.messages import Beat, ErrorNote, WorkerState

CLUSTER = {"CPU": 100.0, "GPU": 0.0}
SHAPE = ItemShape(grids=((1, 10, 10),), num_patches=100, num_tokens=2)


@dataclass
class Process:
    """A worker's process."""

    life: Life = Life.WAITING
    state: WorkerState = WorkerState.STARTING
    num_lives: int = 1
    silent_s: float = 0.0
    reason: str = ""
    ended: bool = False
    backlog: set[int] = field(default_factory=set)  # leases of what it has not settled
    gpu_uuid: str | None = None


class FakeCrew:
    """Processes that do what the test says, beside a real router."""

    def __init__(self, clock: Clock) -> None:
        self.router = Router(
            fake_adapter(), lease_timeout_s=1000.0, silent_timeout_s=1000.0, now_s=clock, rng=random.Random(0)
        )
        self.processes: dict[str, Process] = {}
        self.launched: list[str] = []
        self.buried: dict[str, Process] = {}
        self.router_is_away = False
        self.starts_by_itself = True
        self.on_launch: Callable[[str], object] = lambda worker_id: None
        self.waiting = ""
        self.total = CLUSTER

    def check(self, groups: Iterable[GroupConfig]) -> None:
        check_total(list(groups), self.total)

    def launch(self, worker_id: str, group: GroupConfig) -> None:
        assert worker_id not in self.launched, "a name was used twice"
        self.launched.append(worker_id)
        self.processes[worker_id] = Process()
        self.on_launch(worker_id)

    def look(self) -> Mapping[str, Sight]:
        for worker_id, process in self.processes.items():
            if self.starts_by_itself and process.state is WorkerState.STARTING and process.life is not Life.DEAD:
                self.start(worker_id)
            if process.ended and not process.backlog:
                process.life = Life.DEAD
        return {
            worker_id: Sight(life=process.life, silent_s=process.silent_s, reason=process.reason)
            for worker_id, process in self.processes.items()
        }

    def members(self) -> Sequence[Member] | None:
        return None if self.router_is_away else self.router.members()

    def num_refused(self) -> int | None:
        return None if self.router_is_away else self.router.refused()

    def stop_leases(self, worker_id: str) -> None:
        self.router.drain(worker_id)

    def suspect(self, incarnation: str) -> None:
        self.router.suspect(incarnation)

    def drain(self, worker_id: str) -> bool:
        process = self.processes[worker_id]
        if process.state is WorkerState.READY:
            process.state = WorkerState.DRAINING
            self.tell(worker_id)
        return not process.backlog

    def end(self, worker_id: str) -> None:
        self.processes[worker_id].ended = True

    def restart(self, worker_id: str) -> None:
        process = self.processes[worker_id]
        process.life, process.silent_s = Life.AWAY, 0.0
        self.kill(worker_id)

    def bury(self, worker_id: str) -> None:
        self.buried[worker_id] = self.processes.pop(worker_id)

    def forget(self, worker_id: str) -> None:
        self.router.forget(worker_id)

    def why_waiting(self, worker_ids: Iterable[str]) -> str:
        return self.waiting

    # --- what tests do to processes ---

    def tell(self, worker_id: str, error: ErrorNote | None = None) -> None:
        process = self.processes[worker_id]
        self.router.register(
            report(
                worker_id,
                incarnation=f"{worker_id}/{process.num_lives}",
                state=process.state,
                error=error,
                gpu_uuid=process.gpu_uuid,
            )
        )

    def start(self, worker_id: str) -> None:
        process = self.processes[worker_id]
        process.life, process.state = Life.UP, WorkerState.READY
        self.tell(worker_id)

    def fail(self, worker_id: str, error: ErrorNote) -> None:
        process = self.processes[worker_id]
        process.life, process.state = Life.UP, WorkerState.FAILED
        self.tell(worker_id, error)

    def kill(self, worker_id: str) -> None:
        """Its process dies; Ray starts another."""
        process = self.processes[worker_id]
        self.router.suspect(f"{worker_id}/{process.num_lives}")
        process.life, process.state = Life.AWAY, WorkerState.STARTING
        process.num_lives += 1
        process.backlog.clear()

    def lose(self, worker_id: str, reason: str = "no more") -> None:
        """It dies for good."""
        self.kill(worker_id)
        self.processes[worker_id].life, self.processes[worker_id].reason = Life.DEAD, reason


class SilentFleet:
    """Workers and a router that a replanner does not reach."""

    def reports(self) -> None:
        return None

    def report(self, worker_id: str) -> None:
        return None

    def traffic(self) -> None:
        return None

    def apply(self, worker_id: str, keys: tuple[GraphKey, ...]) -> None:
        raise AssertionError(f"nothing is known of {worker_id}")


class Scene:
    """A supervisor, its crew and its clock."""

    def __init__(self, config: PoolConfig | None = None) -> None:
        self.clock = Clock()
        self.crew = FakeCrew(self.clock)
        self.config = config or tiny_config(drain_timeout_s=30, start_timeout_s=60, stuck_timeout_s=10)
        groups = settle_groups(self.config.worker_groups, CLUSTER)
        self.supervisor = Supervisor(self.config, groups, self.crew, now_s=self.clock)

    def started(self) -> Scene:
        self.supervisor.start(self.clock.now + 1)
        return self

    def ticks(self, count: int, step_s: float = 0.5) -> None:
        for _ in range(count):
            self.clock.now += step_s
            self.supervisor.tick()

    def stages(self) -> dict[str, Stage]:
        return {worker.worker_id: worker.stage for worker in self.supervisor.status().workers}

    def lease(self) -> Lease:
        (lease,) = self.crew.router.assign([LeaseRequest(shape=SHAPE)])
        assert isinstance(lease, Lease)
        self.crew.processes[lease.worker_id].backlog.add(lease.lease_id)
        return lease

    def settle(self, lease: Lease) -> None:
        self.crew.processes[lease.worker_id].backlog.discard(lease.lease_id)
        process = self.crew.processes[lease.worker_id]
        self.crew.router.beat(
            Beat(
                worker_id=lease.worker_id,
                incarnation=lease.incarnation,
                state=process.state,
                settled=(lease.lease_id,),
            )
        )


def test_all_workers_are_ready_after_a_start() -> None:
    stage = Scene().started()
    assert stage.stages() == {"worker-0": Stage.READY, "worker-1": Stage.READY}
    assert stage.supervisor.status().settled


@pytest.mark.parametrize(
    ("note", "kind"),
    [
        (ErrorNote(name="WeightsError", message="no tensors"), WeightsError),
        (ErrorNote(name="EncodeError", message="odd"), WorkerStartError),
    ],
)
def test_a_start_fails_with_what_its_first_failing_worker_says(note: ErrorNote, kind: type[Exception]) -> None:
    stage = Scene()
    stage.crew.starts_by_itself = False
    stage.crew.on_launch = lambda worker_id: stage.crew.fail(worker_id, note)
    with pytest.raises(kind, match=f"worker-0 could not start: {note.name}: {note.message}"):
        stage.started()


def test_a_start_that_finds_no_place_in_time_says_what_is_missing() -> None:
    stage = Scene()
    stage.crew.starts_by_itself, stage.crew.waiting = False, "worker-1 found no place"
    with pytest.raises(WorkerStartError, match="after 60 s worker-1 found no place; free the resources"):
        stage.supervisor.start(stage.clock.now - 1)


def test_scaling_up_launches_and_scaling_down_drains_the_newest() -> None:
    stage = Scene().started()
    stage.supervisor.scale(4)
    stage.ticks(2)
    assert list(stage.stages()) == ["worker-0", "worker-1", "worker-2", "worker-3"]
    assert stage.supervisor.status().settled
    stage.supervisor.scale(1)
    stage.ticks(12)
    assert stage.stages() == {"worker-0": Stage.READY}
    assert set(stage.crew.buried) == {"worker-1", "worker-2", "worker-3"}
    assert [member.worker_id for member in stage.crew.router.members()] == ["worker-0"]


def test_a_draining_worker_gets_no_leases_and_ends_only_when_all_it_had_is_settled() -> None:
    stage = Scene().started()
    leases = [stage.lease() for _ in range(6)]
    kept = [lease for lease in leases if lease.worker_id == "worker-1"]
    assert kept
    stage.supervisor.drain("worker-1")
    assert {stage.lease().worker_id for _ in range(4)} == {"worker-0"}
    stage.ticks(int(2 * LEASES_S) + 4)
    assert stage.stages()["worker-1"] is Stage.DRAINING
    assert stage.crew.processes["worker-1"].state is WorkerState.DRAINING  # it refuses what clients still hold
    for lease in kept:
        stage.settle(lease)
    stage.ticks(1)
    assert stage.stages()["worker-1"] is Stage.ENDING
    stage.ticks(int(2 * GRACE_S) + 4)
    assert stage.stages() == {"worker-0": Stage.READY}
    assert not stage.crew.buried["worker-1"].backlog


def test_a_worker_that_does_not_empty_is_ended_when_its_time_is_up() -> None:
    stage = Scene().started()
    for _ in range(4):
        stage.lease()
    stage.supervisor.drain("worker-1")
    stage.ticks(58)
    assert stage.stages()["worker-1"] is Stage.DRAINING
    stage.ticks(60)
    assert "worker-1" in stage.crew.buried
    assert "worker-1 was not empty after 30 s" in stage.supervisor.status().notes[0]


def test_a_drained_worker_is_replaced_when_asked_for() -> None:
    stage = Scene().started()
    stage.supervisor.drain("worker-0", replace=True)
    stage.ticks(12)
    assert stage.stages() == {"worker-1": Stage.READY, "worker-2": Stage.READY}


def test_a_worker_that_restarts_is_away_until_it_is_ready_again() -> None:
    stage = Scene().started()
    stage.crew.starts_by_itself = False
    stage.crew.kill("worker-0")
    stage.ticks(1)
    assert stage.stages()["worker-0"] is Stage.AWAY
    stage.crew.start("worker-0")
    stage.ticks(1)
    (worker,) = [worker for worker in stage.supervisor.status().workers if worker.worker_id == "worker-0"]
    assert (worker.stage, worker.num_restarts) == (Stage.READY, 1)
    assert len(stage.crew.launched) == 2


def test_a_worker_that_loads_again_is_not_ready_by_what_its_dead_process_had_said() -> None:
    stage = Scene().started()
    stage.crew.starts_by_itself = False
    stage.crew.kill("worker-0")
    stage.ticks(1)
    stage.crew.processes["worker-0"].life = Life.UP
    stage.ticks(10)
    assert stage.stages() == {"worker-0": Stage.AWAY, "worker-1": Stage.READY}
    stage.crew.start("worker-0")
    stage.ticks(1)
    assert stage.supervisor.status().settled


def dying_at_every_other_look(crew: FakeCrew, worker_id: str) -> None:
    """From now on its process comes up, and dies as it loads."""
    look = crew.look

    def look_on() -> Mapping[str, Sight]:
        process = crew.processes[worker_id]
        process.life = Life.UP if process.life is Life.AWAY else Life.AWAY
        return look()

    crew.starts_by_itself = False
    crew.look = look_on  # type: ignore[method-assign]


@pytest.mark.timeout(20)
def test_a_start_fails_soon_when_a_process_dies_again_and_again_as_it_loads() -> None:
    stage = Scene()

    def let_one_die(worker_id: str) -> None:
        if worker_id == "worker-1":
            dying_at_every_other_look(stage.crew, worker_id)

    stage.crew.on_launch = let_one_die
    with pytest.raises(WorkerStartError, match="worker-1 could not start: its process died 3 times as it loaded; is"):
        stage.supervisor.start(stage.clock.now + 1)


def test_a_start_that_is_over_names_processes_that_never_came_up() -> None:
    stage = Scene()
    stage.crew.starts_by_itself = False
    stage.crew.on_launch = lambda worker_id: setattr(stage.crew.processes[worker_id], "life", Life.AWAY)
    with pytest.raises(WorkerStartError, match="after 60 s the process of worker-0, worker-1 dies as it starts; free"):
        stage.supervisor.start(stage.clock.now - 1)


def test_a_worker_that_does_not_come_back_because_its_process_dies_again_and_again_is_told_once() -> None:
    stage = Scene().started()
    stage.crew.kill("worker-0")
    dying_at_every_other_look(stage.crew, "worker-0")
    stage.ticks(20)
    status = stage.supervisor.status()
    told = "its process died 3 times as it loaded; is there memory enough for it?"
    assert status.notes == (f"worker-0 does not come up: {told}",)
    assert [worker.error for worker in status.workers] == [told, None]
    stage.crew.look = FakeCrew.look.__get__(stage.crew)  # type: ignore[method-assign]
    stage.crew.start("worker-0")
    stage.ticks(1)
    assert stage.supervisor.status().settled
    assert stage.supervisor.status().workers[0].error is None


def test_a_worker_whose_node_left_no_room_says_what_it_waits_for() -> None:
    stage = Scene().started()
    stage.crew.starts_by_itself, stage.crew.waiting = False, "worker-0 found no place"
    stage.crew.kill("worker-0")
    stage.ticks(125)
    (worker, _) = stage.supervisor.status().workers
    assert (worker.stage, worker.error) == (Stage.AWAY, "worker-0 found no place")
    stage.crew.start("worker-0")
    stage.ticks(1)
    assert stage.supervisor.status().workers[0].error is None


def test_an_idle_worker_that_dies_gets_no_leases_before_a_client_finds_out() -> None:
    scene = Scene().started()
    scene.crew.processes["worker-0"].life = Life.AWAY
    scene.ticks(1)
    assert {scene.lease().worker_id for _ in range(6)} == {"worker-1"}


def test_a_worker_lost_for_good_is_replaced_ever_more_slowly_while_that_does_not_help() -> None:
    stage = Scene().started()
    stage.crew.lose("worker-1", "its node is gone")
    stage.crew.starts_by_itself = False
    launches = []
    for _ in range(240):
        stage.ticks(1)
        if len(stage.crew.launched) > len(launches) + 2:
            launches.append(stage.clock.now)
            stage.crew.lose(stage.crew.launched[-1], "again")
    gaps = [after - before for before, after in pairwise(launches)]
    assert gaps == sorted(gaps)
    assert 1.5 <= gaps[0] <= 3
    assert gaps[-1] > 20
    assert "worker-1 is lost: its node is gone" in stage.supervisor.status().notes
    stage.crew.starts_by_itself = True
    stage.ticks(150)
    assert stage.supervisor.status().settled


def test_a_stuck_worker_is_killed_and_comes_back() -> None:
    stage = Scene().started()
    stage.crew.processes["worker-0"].silent_s = 9.0
    stage.ticks(1)
    assert stage.stages()["worker-0"] is Stage.READY
    stage.crew.processes["worker-0"].silent_s = 11.0
    stage.ticks(1)
    assert stage.crew.processes["worker-0"].num_lives == 2
    stage.ticks(1)
    assert stage.supervisor.status().settled


def test_a_worker_that_finds_no_place_is_given_up_in_time() -> None:
    stage = Scene().started()
    stage.crew.starts_by_itself, stage.crew.waiting = False, "found no place: asked for 1 GPU"
    stage.supervisor.scale(3)
    stage.ticks(119)
    assert stage.stages()["worker-2"] is Stage.STARTING
    stage.ticks(4)
    assert list(stage.stages()) == ["worker-0", "worker-1"]
    status = stage.supervisor.status()
    assert status.settled
    assert "worker-2 is lost: not ready after 60 s: found no place" in status.notes[-1]


def test_what_cannot_be_is_refused() -> None:
    stage = Scene().started()
    with pytest.raises(ConfigError, match="the pool may have 1 to 4096 workers, got 0"):
        stage.supervisor.scale(0)
    with pytest.raises(ConfigError, match="no group 'gpu'; this pool has no groups"):
        stage.supervisor.scale(2, "gpu")
    with pytest.raises(ConfigError, match="no worker 'worker-9' in this pool; it has worker-0, worker-1"):
        stage.supervisor.drain("worker-9")
    with pytest.raises(WorkerStartError, match="300 workers need 150 CPUs, the cluster has 100"):
        stage.supervisor.scale(300)
    assert stage.supervisor.status().targets == {"worker": 2}


@pytest.mark.parametrize("number", [1.5, float("nan"), "2", None, [2]])
def test_what_is_no_number_of_workers_is_refused_and_the_pool_is_looked_after_as_before(number: Any) -> None:
    stage = Scene().started()
    with pytest.raises(ConfigError, match="the pool may have 1 to 4096 workers, got"):
        stage.supervisor.scale(number)
    stage.ticks(1)
    assert stage.supervisor.status().targets == {"worker": 2}


def test_two_workers_on_one_gpu_are_an_error_that_names_both() -> None:
    stage = Scene()
    stage.crew.starts_by_itself = False

    def start_on_gpu(worker_id: str) -> None:
        stage.crew.processes[worker_id].gpu_uuid = "GPU-1"
        stage.crew.start(worker_id)

    stage.crew.on_launch = start_on_gpu
    with pytest.raises(WorkerStartError, match="worker-1 could not start: worker-0 and worker-1 share GPU GPU-1"):
        stage.started()


def test_groups_have_their_own_numbers_and_names() -> None:
    groups = [{"name": "big", "num_workers": 1, "cpus_per_worker": 4}, {"name": "small", "num_workers": 2}]
    worker = {"device": "cpu", "encoder": {"model": "tiny-minicpmv-2.6"}}
    stage = Scene(PoolConfig.model_validate({"groups": groups, "worker": worker})).started()
    assert list(stage.stages()) == ["big-0", "small-0", "small-1"]
    with pytest.raises(ConfigError, match="say which group; this pool has big, small"):
        stage.supervisor.scale(3)
    with pytest.raises(ConfigError, match="group small may have 0 to 4096 workers, got 5000"):
        stage.supervisor.scale(5000, "small")
    stage.supervisor.scale(0, "small")
    stage.supervisor.scale(2, "big")
    stage.ticks(12)
    assert list(stage.stages()) == ["big-0", "big-1"]


def test_a_supervisor_that_takes_over_finds_everything_as_it_was() -> None:
    before = Scene().started()
    before.supervisor.scale(4)
    before.ticks(2)
    lease = before.lease()
    before.supervisor.drain(lease.worker_id)
    before.ticks(1)
    after = Supervisor(
        before.config, settle_groups(before.config.worker_groups, CLUSTER), before.crew, now_s=before.clock
    )
    after.adopt(before.crew.processes)
    before.supervisor = after
    before.ticks(4)
    assert after.status().targets == {"worker": 3}
    assert before.stages()[lease.worker_id] is Stage.DRAINING
    before.settle(lease)
    before.ticks(12)
    assert after.status().settled
    after.scale(4)
    before.ticks(2)
    assert before.crew.launched[-1] == "worker-4"


def test_what_is_decided_on_graphs_is_in_the_status() -> None:
    stage = Scene()
    groups, encoder = settle_groups(stage.config.worker_groups, CLUSTER), stage.config.worker.encoder
    config = ReplanConfig(interval_s=10)
    replanner = Replanner(SilentFleet(), load_adapter(encoder), encoder, config, now_s=stage.clock)
    stage.supervisor = Supervisor(stage.config, groups, stage.crew, Replanning([replanner]), now_s=stage.clock)
    assert stage.supervisor.status().replanning[0].note == "not looked at yet"
    stage.started().ticks(24)
    (decision,) = stage.supervisor.status().replanning
    assert decision.note == "workers or the router did not answer"
    assert (decision.model, decision.age_s, decision.next_look_s) == (encoder.model, 2.0, 8.0)


@pytest.mark.timeout(20)
def test_nobody_is_looked_after_where_the_way_to_the_workers_is_shut(caplog: pytest.LogCaptureFixture) -> None:
    stage = Scene().started()

    def look() -> Mapping[str, Sight]:
        raise PoolClosedError("the connection was shut down")

    stage.crew.look = look  # type: ignore[method-assign]
    stage.supervisor.run()
    assert "nobody looks after the workers any more: the connection was shut down" in caplog.text


def test_a_router_that_is_away_changes_nothing() -> None:
    stage = Scene().started()
    stage.crew.router_is_away = True
    stage.ticks(20)
    assert stage.supervisor.status().settled
    assert len(stage.crew.launched) == 2


def test_a_busy_pool_grows_and_an_idle_one_shrinks() -> None:
    limits = {"min_workers": 1, "max_workers": 4, "target_queue_ms": 20, "up_after_s": 2, "down_after_s": 10}
    stage = Scene(tiny_config(num_workers=1, autoscale=limits)).started()
    leases = [stage.lease() for _ in range(50)]  # 1.25 ms each
    stage.ticks(30)
    assert stage.supervisor.status().targets == {"worker": 4}
    for lease in leases:
        stage.settle(lease)
    stage.ticks(150)
    assert stage.supervisor.status().targets == {"worker": 1}
    assert stage.stages() == {"worker-0": Stage.READY}


def test_what_a_router_refused_before_it_was_away_is_not_refused_again() -> None:
    limits = {"min_workers": 1, "max_workers": 4, "up_after_s": 0}
    stage = Scene(tiny_config(num_workers=1, autoscale=limits)).started()
    leases: list[Lease] = []
    while isinstance(answer := stage.crew.router.assign([LeaseRequest(shape=SHAPE)])[0], Lease):
        leases.append(answer)
    for lease in leases:
        stage.settle(lease)
    stage.ticks(1)
    stage.crew.router_is_away = True
    stage.ticks(1)
    stage.crew.router_is_away = False
    stage.ticks(10)
    assert stage.supervisor.status().targets == {"worker": 1}


class Fleet(RuleBasedStateMachine):
    """Whatever happens, work is settled unless its worker died, and the number of workers comes right in the end."""

    def __init__(self) -> None:
        super().__init__()
        self.stage = Scene(tiny_config(drain_timeout_s=1e5, start_timeout_s=60, stuck_timeout_s=10)).started()
        self.leases: list[Lease] = []

    def ready(self) -> list[str]:
        return [worker_id for worker_id, stage in self.stage.stages().items() if stage is Stage.READY]

    @rule(count=st.integers(1, 10))
    def time_passes(self, count: int) -> None:
        self.stage.ticks(count)

    @rule(num_workers=st.integers(1, 6))
    def scale(self, num_workers: int) -> None:
        self.stage.supervisor.scale(num_workers)

    @rule(data=st.data(), replace=st.booleans())
    def drain(self, data: st.DataObject, replace: bool) -> None:
        if len(self.ready()) > 1:
            self.stage.supervisor.drain(data.draw(st.sampled_from(self.ready())), replace=replace)

    @rule(data=st.data(), for_good=st.booleans())
    def die(self, data: st.DataObject, for_good: bool) -> None:
        alive = [worker_id for worker_id, process in self.stage.crew.processes.items() if process.life is Life.UP]
        if alive:
            worker_id = data.draw(st.sampled_from(sorted(alive)))
            (self.stage.crew.lose if for_good else self.stage.crew.kill)(worker_id)

    @rule()
    def lease(self) -> None:
        (lease,) = self.stage.crew.router.assign([LeaseRequest(shape=SHAPE)])
        if isinstance(lease, Lease) and lease.worker_id in self.stage.crew.processes:
            assert self.stage.stages()[lease.worker_id] not in (Stage.DRAINING, Stage.ENDING)
            self.stage.crew.processes[lease.worker_id].backlog.add(lease.lease_id)
            self.leases.append(lease)

    @rule()
    def settle(self) -> None:
        while self.leases:
            lease = self.leases.pop()
            process = self.stage.crew.processes.get(lease.worker_id)
            if process is not None and lease.lease_id in process.backlog:
                self.stage.settle(lease)
                return

    @invariant()
    def nobody_was_ended_with_work_on_board(self) -> None:
        for process in self.stage.crew.buried.values():
            assert not process.backlog

    def teardown(self) -> None:
        while self.leases:
            self.settle()
        self.stage.ticks(400)
        status = self.stage.supervisor.status()
        assert status.settled, self.stage.stages()
        members = {member.worker_id for member in self.stage.crew.router.members()}
        assert members == set(self.stage.stages()) == set(self.stage.crew.processes)


TestFleet = Fleet.TestCase
TestFleet.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
