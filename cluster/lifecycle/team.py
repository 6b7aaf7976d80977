"""`Team`: a group of workers as its supervisor keeps it, and `Post`, one worker of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.groups import MAX_WORKERS, GroupConfig
from cluster.lifecycle.autoscaling import Autoscaler, LoadSample
from cluster.lifecycle.crew import Life
from cluster.lifecycle.status import Stage, WorkerStatus
from cluster.routing.roster import Member
from workers.messages import ErrorNote

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0

LEAVING = (Stage.DRAINING, Stage.ENDING)


@dataclass(slots=True, kw_only=True)
class Post:
    """One worker that the pool has, or is about to have."""

    worker_id: str
    group: str
    stage: Stage
    since_s: float  # of the stage
    incarnation: str | None = None
    num_restarts: int = 0
    error: ErrorNote | None = None
    was_ready: bool = False
    life: Life = Life.WAITING  # of its process, when it was last looked at
    num_deaths: int = 0  # of its processes, since one was ready

    @property
    def number(self) -> int:
        """Its number in the group; higher ones came later."""
        return number_of(self.worker_id)

    def status(self, member: Member | None) -> WorkerStatus:
        """For people; `member` is how the router knows it."""
        return WorkerStatus(
            worker_id=self.worker_id,
            group=self.group,
            stage=self.stage,
            num_restarts=self.num_restarts,
            error=None if self.error is None else self.error.message,
            member=member,
        )


class Team:
    """A group's target, and when the next worker may be launched."""

    def __init__(self, config: GroupConfig, *, is_alone: bool) -> None:
        """`is_alone`: the pool has no other group."""
        self.config = config
        self.title = "the pool" if is_alone else f"group {config.name}"  # for people
        self._is_alone = is_alone
        self.target = config.num_workers
        self.autoscaler = None if config.autoscale is None else Autoscaler(config.autoscale)
        self.not_before_s = float("-inf")
        self._pause_s = FIRST_PAUSE_S
        self._next_number = 0

    @property
    def limits(self) -> tuple[int, int]:
        """How few and how many workers somebody may ask for; the only group of a pool keeps one."""
        if self.config.autoscale is not None:
            return self.config.autoscale.min_workers, self.config.autoscale.max_workers
        return int(self._is_alone), MAX_WORKERS

    def wanted(self, posts: Sequence[Post], sample: LoadSample) -> int:
        """How many workers there should be for the load; as many as now while not all of them are ready."""
        if self.autoscaler is None:
            return self.target
        if len(posts) != self.target or any(post.stage is not Stage.READY for post in posts):
            self.autoscaler.changed()
            return self.target
        wanted = self.autoscaler.wanted(sample, self.target)
        if wanted != self.target:
            self.autoscaler.changed()
        return wanted

    def next_id(self) -> str:
        """A name for a new worker. None is used twice: who still holds an old worker's handle must not mistake it."""
        self._next_number += 1
        return f"{self.config.name}-{self._next_number - 1}"

    def met(self, worker_id: str) -> None:
        """That name is taken."""
        self._next_number = max(self._next_number, number_of(worker_id) + 1)

    def lost_one(self, now_s: float) -> None:
        """Wait before the next is launched, twice as long as the last time."""
        self.not_before_s = now_s + self._pause_s
        self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s)

    def got_one(self) -> None:
        """A worker is ready: what kept others from starting may have passed."""
        self._pause_s = FIRST_PAUSE_S


def number_of(worker_id: str) -> int:
    """`gpu-3` is number 3."""
    return int(worker_id.rpartition("-")[2])
