"""Pools that live on without a program of their own: raised, used by several, changed under load, hurt, and ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path

import pytest
import ray
from background import Background
from fakes import heed_interrupts, tiny_config
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

from cluster import EncoderPool
from cluster.lifecycle.actors import SUPERVISOR, find_actor, parts_of, pools_here
from cluster.lifecycle.places import places_of
from cluster.lifecycle.processes import born
from cluster.lifecycle.standing import end_pool, raise_pool
from cluster.lifecycle.status import Stage
from cluster.lifecycle.top import watch_pool
from cluster.planning.traces import read_trace
from cluster.streams.outcomes import Outcome
from encoder.errors import ConfigError, PoolClosedError, WorkerStartError

ROOT = Path(__file__).parents[2]
CPUS = 0.1  # of the session's few, for each worker


def until(true: Callable[[], object], what: str, *, timeout_s: float = 60) -> None:
    limit_s = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < limit_s, what
        time.sleep(0.1)


def ready(pool: EncoderPool) -> set[str]:
    return {worker.worker_id for worker in pool.status().workers if worker.stage is Stage.READY}


class Load(Background):
    """A client that encodes pictures over and over in a thread until told to finish.

    With pauses, since it shares two cores with the workers that come and go.
    """

    join_s = 60.0

    def __init__(self, pool: EncoderPool, pictures: list[Path], *, pause_s: float = 0.1) -> None:
        super().__init__()
        self.outcomes: list[Outcome] = []
        self._pause_s = pause_s
        self._pool, self._pictures = pool, pictures

    def _sources(self) -> Iterator[Path]:
        for picture in cycle(self._pictures):
            if self.end.wait(self._pause_s):
                return
            yield picture

    def run(self) -> None:
        self.outcomes.extend(self._pool.encode_many(self._sources()))


@pytest.fixture
def pictures(save_picture: Callable[..., Path]) -> list[Path]:
    return [save_picture(f"{number}.jpg", 200 + 40 * number, 150, seed=number) for number in range(8)]


@pytest.fixture(scope="module")
def standing(nodes: Cluster) -> Iterator[str]:
    config = tiny_config(num_workers=2, name="standing", cpus_per_worker=CPUS)
    assert raise_pool(config).settled
    yield config.name
    if config.name in pools_here():
        end_pool(config.name)


def test_two_programs_use_a_pool_that_grows_and_shrinks_and_nothing_is_lost(
    nodes: Cluster, standing: str, pictures: list[Path], tmp_path: Path
) -> None:
    out, folder = tmp_path / "out", str(pictures[0].parent)
    command = [sys.executable, "-m", "cluster.cli", "encode", "--pool", standing, *[folder] * 5, "--out", str(out)]
    other = subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, "RAY_ADDRESS": nodes.address}, text=True, stderr=subprocess.PIPE
    )
    with EncoderPool.connect(standing) as pool:
        with Load(pool, pictures) as load:
            pool.scale(3)
            assert ready(pool) == {"worker-0", "worker-1", "worker-2"}
            until(lambda: _workers_of(load.outcomes) >= {"worker-2"}, "the new worker gets nothing")
            pool.scale(1)
            assert ready(pool) == {"worker-0"}
        assert [outcome.error for outcome in load.outcomes if outcome.error is not None] == []
        assert len(load.outcomes) >= len(pictures)
        assert pool.stats().num_workers == 1
    _, said = other.communicate(timeout=90)
    assert other.returncode == 0, said
    assert len((out / "manifest.jsonl").read_text().splitlines()) == 5 * len(pictures)
    with EncoderPool.connect(standing) as pool:  # closing one left the pool as it was
        assert pool.encode(pictures[0]).worker == "worker-0"


def _workers_of(outcomes: list[Outcome]) -> set[str]:
    return {outcome.embedding.worker for outcome in outcomes if outcome.embedding is not None}


def test_what_a_standing_pool_encodes_is_recorded_by_a_command_beside_it(
    nodes: Cluster, standing: str, pictures: list[Path], tmp_path: Path
) -> None:
    trace = tmp_path / "traffic.trace"
    command = [
        sys.executable, "-m", "cluster.cli", "trace", "--pool", standing, "--out", str(trace), "--duration", "600",
    ]  # fmt: skip
    environment = {**os.environ, "RAY_ADDRESS": nodes.address}
    recorder = subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, preexec_fn=heed_interrupts
    )
    with EncoderPool.connect(standing, nodes.address) as pool, Load(pool, pictures):
        until(
            lambda: (trace.exists() and trace.stat().st_size > 1000) or recorder.poll() is not None, "nothing recorded"
        )
    recorder.send_signal(signal.SIGINT)
    said, _ = recorder.communicate(timeout=30)
    assert recorder.returncode == 0
    records = list(read_trace(trace))
    assert f"{len(records)} items of pool 'standing' recorded" in said
    assert {one.model for one in records} == {"tiny-minicpmv-2.6"}
    assert all(one.graphs and one.ms > 0 for one in records)


def test_a_name_in_use_is_refused_and_an_unknown_one_is_told_the_others(standing: str) -> None:
    with pytest.raises(ConfigError, match="a pool 'standing' is running already; end it with `encpool down standing`"):
        raise_pool(tiny_config(name=standing, cpus_per_worker=CPUS))
    with pytest.raises(ConfigError, match="no pool 'standig' is running on this cluster; running: 'standing'"):
        EncoderPool.connect("standig")


def test_top_shows_once_where_nobody_watches(standing: str, capsys: pytest.CaptureFixture[str]) -> None:
    with EncoderPool.connect(standing) as pool:
        watch_pool(pool, every_s=1.0)
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "pool 'standing': tiny-minicpmv-2.6, 1 of 1 workers ready"
    assert shown[3].split()[:2] == ["worker-0", "ready"]


def test_a_killed_supervisor_comes_back_and_finds_its_workers(standing: str, pictures: list[Path]) -> None:
    with EncoderPool.connect(standing) as pool:
        before = {worker.member.incarnation for worker in pool.status().workers if worker.member}
        ray.kill(find_actor(standing, SUPERVISOR), no_restart=False)
        assert pool.encode(pictures[0]).graphs
        until(lambda: pool.status().settled, "the supervisor did not come back")
        status = pool.status()
        assert {worker.member.incarnation for worker in status.workers if worker.member} == before
        assert status.targets == {"worker": 1}


def test_a_worker_that_ray_gives_up_is_replaced(standing: str, pictures: list[Path]) -> None:
    with EncoderPool.connect(standing) as pool:
        (before,) = ready(pool)
        with Load(pool, pictures) as load:
            ray.kill(find_actor(standing, before))
            until(lambda: ready(pool) and ready(pool) != {before}, "no other worker came")
        assert [outcome.error for outcome in load.outcomes if outcome.error is not None] == []
        assert f"{before} is lost" in pool.status().notes[0]


def test_an_end_leaves_nothing_and_its_clients_hear_of_it(standing: str, pictures: list[Path]) -> None:
    pool = EncoderPool.connect(standing)
    pids = [report.pid for report in pool.stats().reports]
    assert pids
    heard: list[BaseException] = []

    def encode_for_ever() -> None:
        try:
            for outcome in pool.encode_many(pictures * 1000):
                assert outcome.error is None
        except PoolClosedError as error:
            heard.append(error)

    thread = threading.Thread(target=encode_for_ever)
    thread.start()
    time.sleep(0.5)
    theirs = placement_group([{"memory": 1.0}], name=f"{standing}.training")  # of some other program in the cluster
    os.kill(pids[0], signal.SIGSTOP)  # stuck: it answers nobody, and Ray takes seconds to kill it
    end_pool(standing)
    assert not [pid for pid in pids if born(pid) is not None]
    assert placement_group_table(theirs)["state"] == "CREATED"
    remove_placement_group(theirs)
    thread.join(30)
    assert len(heard) == 1
    with pytest.raises(PoolClosedError):
        pool.status()
    pool.close()
    assert parts_of(standing) == []
    assert standing not in pools_here()
    assert places_of(standing) == []
    with pytest.raises(ConfigError, match="no pool 'standing' is running"):
        end_pool(standing)


def test_resources_that_others_hold_fail_the_start_in_time_and_leave_nothing(nodes: Cluster, pool: EncoderPool) -> None:
    started_s = time.monotonic()
    config = tiny_config(name="greedy", cpus_per_worker=1.9, start_timeout_s=1)
    with pytest.raises(WorkerStartError, match=r"asked for 1 x \(1.9 CPU\), the cluster has 4 CPU \(\d[.\d]* free\)"):
        raise_pool(config)
    assert time.monotonic() - started_s < 30
    assert parts_of("greedy") == []


def test_a_queue_brings_a_worker_and_its_end_takes_it_away(nodes: Cluster, pictures: list[Path]) -> None:
    limits = {"min_workers": 1, "max_workers": 2, "target_queue_ms": 0.1, "up_after_s": 0.5, "down_after_s": 1}
    config = tiny_config(num_workers=1, autoscale=limits, cpus_per_worker=CPUS)
    with EncoderPool.start(config) as pool:
        with Load(pool, pictures, pause_s=0.01) as load:
            until(lambda: len(ready(pool)) == 2, "no second worker came")
        assert [outcome.error for outcome in load.outcomes if outcome.error is not None] == []
        until(lambda: ready(pool) == {"worker-0"}, "the second worker stays")


def test_a_worker_whose_node_dies_lives_on_elsewhere(nodes: Cluster, pictures: list[Path]) -> None:
    first = nodes.add_node(num_cpus=1, resources={"spare": 1})
    with EncoderPool.start(tiny_config(num_workers=1, cpus_per_worker=CPUS, resources={"spare": 1})) as pool:
        second = nodes.add_node(num_cpus=1, resources={"spare": 1})
        with Load(pool, pictures) as load:
            until(lambda: load.outcomes, "nothing was encoded")
            nodes.remove_node(first, allow_graceful=False)
            until(lambda: pool.status().workers[0].num_restarts == 1 and ready(pool), "the worker did not come back")
            count = len(load.outcomes)
            until(lambda: len(load.outcomes) > count, "nothing is encoded after that")
        assert [outcome.error for outcome in load.outcomes if outcome.error is not None] == []
    nodes.remove_node(second)
