"""Handles of a pool's actors, and what an actor's own thread does when it breaks. No Ray is started."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace

import pytest
from ray.exceptions import GetTimeoutError, RayActorError

from cluster.lifecycle import actors
from cluster.lifecycle.actors import WorkerHandles
from cluster.lifecycle.stats import PoolStats
from cluster.pool import EncoderPool
from cluster.streams.gate import Gate
from workers.actor import EncoderWorkerActor
from workers.metrics import Meter
from workers.samples import Sample


def test_a_look_up_that_hangs_keeps_nobody_from_a_worker_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, answer = threading.Event(), threading.Event()

    def find(pool: str, part: str) -> str:
        if part == "b":
            asked.set()
            answer.wait(20)
        return f"{pool}.{part}"

    monkeypatch.setattr(actors, "find_actor", find)
    workers = WorkerHandles("p")
    workers.keep(["a"])
    hanging = threading.Thread(target=workers.handle, args=("b",))
    hanging.start()
    assert asked.wait(20)
    known: list[object] = []
    asking = threading.Thread(target=lambda: known.append(workers.handle("a")))
    asking.start()
    asking.join(5)
    known_meanwhile = list(known)
    answer.set()
    hanging.join(20)
    asking.join(20)
    assert known_meanwhile == ["p.a"]
    assert len(workers) == 2


def test_only_workers_that_are_to_be_known_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"a", "c"}

    def find(pool: str, part: str) -> str:
        if part not in there:
            raise ValueError(part)
        return part

    monkeypatch.setattr(actors, "find_actor", find)
    workers = WorkerHandles("p")
    workers.keep(["a", "b"])
    assert workers.handles() == ["a"]
    workers.keep(["b", "c"])
    assert workers.handles() == ["c"]
    with pytest.raises(ValueError, match="b"):
        workers.handle("b")


def test_a_router_that_restarts_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[object] = [RayActorError(), GetTimeoutError(), [Sample("encpool_workers_leasable", (), 2)]]

    def get(call: object, timeout: float) -> object:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr("cluster.pool.ray", SimpleNamespace(get=get))  # not Ray's own, which other pools' threads call
    pool = EncoderPool.__new__(EncoderPool)
    pool._gate = Gate()
    pool._router = SimpleNamespace(samples=SimpleNamespace(remote=lambda: None))
    pool._clients = {"": SimpleNamespace(meter=Meter("client"))}  # type: ignore[dict-item]
    monkeypatch.setattr(pool, "stats", lambda: PoolStats(num_workers=0, members=(), reports=()))
    assert "encpool_workers_leasable 2" in pool.metrics()


def test_a_worker_whose_reports_break_ends_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(timeout_s: float) -> None:
        raise ZeroDivisionError("boom")

    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    actor = EncoderWorkerActor.__new__(EncoderWorkerActor)
    actor._worker = SimpleNamespace(wait_started=breaks)
    actor._interval_s = 1.0
    actor._report()
    assert ended == [1]
