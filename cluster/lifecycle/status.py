"""`PoolStatus`: a pool's workers as their supervisor sees them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from cluster.planning.replanner import Decision
from cluster.routing.roster import Member
from encoder.errors import WorkerStartError
from workers.messages import ErrorNote

POLL_S = 0.25


class Stage(StrEnum):
    """Where a worker stands in its life."""

    STARTING = "starting"
    READY = "ready"
    AWAY = "restarting"
    DRAINING = "draining"
    ENDING = "ending"
    LOST = "lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """One worker, for people."""

    worker_id: str
    group: str
    stage: Stage
    num_restarts: int
    error: str | None
    member: Member | None  # as the router knows it


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStatus:
    """A pool, for people."""

    name: str
    started: bool
    targets: Mapping[str, int]  # workers wanted, by group
    models: Mapping[str, str]  # what they encode with, by group
    workers: tuple[WorkerStatus, ...]
    notes: tuple[str, ...]  # what went wrong lately, oldest first
    replanning: tuple[Decision, ...] = ()  # the last about the graphs of each model; none where they stay as they are
    failure: ErrorNote | None = None  # why it could not start

    @property
    def num_ready(self) -> int:
        """Workers that can encode."""
        return sum(worker.stage is Stage.READY for worker in self.workers)

    @property
    def settled(self) -> bool:
        """Whether there are as many workers as wanted, all ready."""
        return self.num_ready == len(self.workers) == sum(self.targets.values())


def wait_until(
    done: Callable[[PoolStatus], bool],
    look: Callable[[], PoolStatus],
    *,
    timeout_s: float,
    now_s: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait for a change of the pool that was just asked for.

    Raises WorkerStartError when it took too long, or when the pool turned to other numbers of workers.
    """
    until_s = now_s() + timeout_s
    before = status = look()
    while not done(status):
        if now_s() > until_s:
            late = [f"{one.worker_id} is {one.stage}" for one in status.workers if one.stage is not Stage.READY]
            raise WorkerStartError(f"after {timeout_s:g} s {', '.join(late) or 'the change is not through'}")
        sleep(POLL_S)
        status = look()
        if status.targets != before.targets:
            why = status.notes[-1] if status.notes != before.notes else "another number of workers was asked for"
            raise WorkerStartError(why)
