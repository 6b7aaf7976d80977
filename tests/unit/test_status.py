"""Waiting for a change of a pool. Without Ray."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from fakes import Clock

from cluster.lifecycle.status import PoolStatus, Stage, WorkerStatus, wait_until
from encoder.errors import WorkerStartError


def status(stages: Sequence[Stage], *, target: int, notes: tuple[str, ...] = ()) -> PoolStatus:
    workers = tuple(
        WorkerStatus(worker_id=f"worker-{number}", group="worker", stage=stage, num_restarts=0, error=None, member=None)
        for number, stage in enumerate(stages)
    )
    return PoolStatus(
        name="p", started=True, targets={"worker": target}, models={"worker": "m"}, workers=workers, notes=notes
    )


def wait(*looks: PoolStatus, timeout_s: float = 10.0) -> None:
    """For a pool that is looked at so many times, the last time again and again."""
    clock, left = Clock(), list(looks)

    def sleep(seconds: float) -> None:
        clock.now += seconds

    wait_until(
        lambda status: status.settled,
        lambda: left.pop(0) if len(left) > 1 else left[0],
        timeout_s=timeout_s,
        now_s=clock,
        sleep=sleep,
    )


def test_it_ends_when_all_that_are_wanted_are_ready() -> None:
    wait(status([Stage.READY, Stage.STARTING], target=2), status([Stage.READY, Stage.READY], target=2))


def test_who_is_late_is_named() -> None:
    with pytest.raises(WorkerStartError, match="after 10 s worker-1 is starting"):
        wait(status([Stage.READY, Stage.STARTING], target=2))


def test_a_change_that_others_turn_is_explained_by_what_went_wrong_since_and_by_nothing_older() -> None:
    began = status([Stage.STARTING], target=3, notes=("old",))
    with pytest.raises(WorkerStartError, match="another number of workers was asked for"):
        wait(began, status([Stage.STARTING], target=2, notes=("old",)))
    with pytest.raises(WorkerStartError, match="worker-2 found no place"):
        wait(began, status([Stage.STARTING], target=2, notes=("old", "worker-2 found no place")))
