"""`Crew`: what a supervisor can do to the world, and what it sees of it. Ray's way is in launching.py."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from cluster.groups import GroupConfig
from cluster.routing.roster import Member


class Life(StrEnum):
    """A worker's process, from outside."""

    WAITING = "waiting"  # never answered: it has no place yet, or its process starts
    UP = "up"
    AWAY = "away"  # it died; Ray starts it again
    DEAD = "dead"  # for good


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """What a look at a worker's process gave."""

    life: Life
    silent_s: float = 0.0  # since a question was put that it has not answered
    reason: str = ""  # why it is dead


class Crew(Protocol):
    """The hands of a supervisor. Every call returns within moments."""

    def check(self, groups: Iterable[GroupConfig]) -> None:
        """Raises WorkerStartError when the cluster could never hold so many."""

    def launch(self, worker_id: str, group: GroupConfig) -> None:
        """Reserve a worker's place and start its process there, as soon as there is room."""

    def look(self) -> Mapping[str, Sight]:
        """Every worker that was launched and has not been buried. Raises PoolClosedError when none can be there."""

    def members(self) -> Sequence[Member] | None:
        """The workers as the router knows them; None while it does not answer."""

    def num_refused(self) -> int | None:
        """Items that the router had no room for so far, each time they asked; None while it does not answer."""

    def stop_leases(self, worker_id: str) -> None:
        """Let the router give no more work to it. May be said again."""

    def suspect(self, incarnation: str) -> None:
        """Tell the router that this process died, before a client finds out."""

    def drain(self, worker_id: str) -> bool:
        """Let it take nothing more; whether it has settled all it had."""

    def end(self, worker_id: str) -> None:
        """Let its process finish and leave."""

    def restart(self, worker_id: str) -> None:
        """Kill its process, which starts again."""

    def bury(self, worker_id: str) -> None:
        """Kill what is left of it, and free its place."""

    def forget(self, worker_id: str) -> None:
        """Let the router forget it."""

    def why_waiting(self, worker_ids: Iterable[str]) -> str:
        """What keeps workers from their places; empty when they have them."""
