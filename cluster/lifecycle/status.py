"""`PoolStatus`: a pool's workers as their supervisor sees them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from cluster.planning.replanner import Decision
from cluster.routing.roster import Member
from workers.messages import ErrorNote


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
