"""`Posts`: the workers of a pool, and what becomes of each.

starting -> ready -> draining -> ending -> gone
    ^         |
    '-- away -'   its process died: Ray starts another, on another node if need be
                  (a worker that Ray gives up is `lost`, and a new one takes its place)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence

from cluster.config import PoolConfig
from cluster.lifecycle.crew import Crew, Life, Sight
from cluster.lifecycle.nodes import crowded_gpus
from cluster.lifecycle.status import Stage
from cluster.lifecycle.team import LEAVING, Post, Team
from cluster.routing.roster import Member
from encoder.errors import WorkerStartError
from workers.messages import ErrorNote, WorkerState

logger = logging.getLogger(__name__)

LEASES_S = 5.0  # until a draining worker refuses what clients hold leases for
GRACE_S = 1.0  # after a worker's last item was settled: its answer is still on the way
END_TIMEOUT_S = 15.0  # until a process that should leave is killed
NUM_NOTES = 8
MANY_DEATHS = 3  # of processes one after the other that were never ready: it is no accident


class Posts:
    """Every worker that there is or should soon be. One thread at a time."""

    def __init__(self, config: PoolConfig, crew: Crew, teams: Mapping[str, Team], now_s: Callable[[], float]) -> None:
        self.started = False  # before that nobody is replaced: the start fails
        self.notes: list[str] = []  # what went wrong lately, oldest first
        self._config = config
        self._crew = crew
        self._teams = teams
        self._now_s = now_s
        self._posts: dict[str, Post] = {}
        self._sights: Mapping[str, Sight] = {}
        self._members: dict[str, Member] = {}

    def __iter__(self) -> Iterator[Post]:
        return iter(list(self._posts.values()))

    def get(self, worker_id: str) -> Post | None:
        """The worker of that name."""
        return self._posts.get(worker_id)

    def member(self, post: Post) -> Member | None:
        """How the router knows a worker."""
        return self._members.get(post.worker_id)

    def add(self, worker_id: str, group: str) -> None:
        """It was launched."""
        self._posts[worker_id] = Post(worker_id=worker_id, group=group, stage=Stage.STARTING, since_s=self._now_s())

    def observe(self, sights: Mapping[str, Sight], members: Sequence[Member] | None) -> None:
        """Take in what a look at the workers gave; `members` is None while the router does not answer."""
        if members is not None:
            self._members = {member.worker_id: member for member in members}
            for worker_id in self._members.keys() - self._posts.keys():  # its last beat came after its end
                self._crew.forget(worker_id)
        self._sights = sights
        for post in self:
            sight = sights.get(post.worker_id, Sight(life=Life.DEAD, reason="its actor is gone"))
            self._see(post, sight, self._members.get(post.worker_id))
        self._see_crowds()

    def advance(self) -> None:
        """Take every worker a step further."""
        for post in self:
            self._step(post)

    def leave(self, post: Post) -> None:
        """Drain it, or end it at once if it never took part."""
        self._crew.stop_leases(post.worker_id)
        self._to(post, Stage.DRAINING if post.was_ready or post.worker_id in self._members else Stage.LOST)

    def note(self, text: str) -> None:
        """Something went wrong that people should know."""
        logger.warning("%s", text)
        self.notes = [*self.notes, text][-NUM_NOTES:]

    # --- what was seen ---------------------------------------------------------------------------------------------

    def _see(self, post: Post, sight: Sight, member: Member | None) -> None:
        if post.stage is Stage.LOST:
            return
        if member is not None and member.incarnation != post.incarnation:
            post.num_restarts += post.incarnation is not None
            post.incarnation = member.incarnation
        if member is not None and (member.error is not None or post.stage is Stage.READY):
            post.error = member.error
        was, post.life = post.life, sight.life
        if sight.life is Life.DEAD:
            if post.stage is not Stage.ENDING:
                self._lose(post, sight.reason)
            return
        if post.stage in LEAVING:
            return
        died_unready = sight.life is Life.AWAY and was is not Life.AWAY and post.stage is not Stage.READY
        if died_unready and self._is_lost_to_deaths(post):
            return
        if member is not None and member.state is WorkerState.DRAINING:  # an earlier supervisor had begun that
            self._teams[post.group].target -= 1
            self._to(post, Stage.DRAINING)
        elif sight.life is Life.AWAY:
            if post.stage is Stage.READY and post.incarnation is not None:
                self._crew.suspect(post.incarnation)
            self._to(post, Stage.AWAY)
        elif sight.life is Life.UP:
            if sight.silent_s > self._config.stuck_timeout_s:
                self.note(f"{post.worker_id} has not answered for {sight.silent_s:.0f} s: killed, it starts again")
                self._crew.restart(post.worker_id)
                self._to(post, Stage.AWAY)
            elif member is not None and member.state is WorkerState.READY:
                if post.stage is Stage.READY or member.leasable:  # else what is known is of a process that has died
                    self._got_ready(post)
            elif post.stage is Stage.READY:
                self._to(post, Stage.AWAY)

    def _got_ready(self, post: Post) -> None:
        if post.stage is not Stage.READY:
            self._teams[post.group].got_one()
        self._to(post, Stage.READY)
        post.was_ready = True
        post.error, post.num_deaths = None, 0

    def _is_lost_to_deaths(self, post: Post) -> bool:
        """One more. Ray starts it again and again: people hear of it, and a pool that starts does not wait for it."""
        post.num_deaths += 1
        if post.num_deaths < MANY_DEATHS:
            return False
        why = f"its process died {post.num_deaths} times as it loaded; is there memory enough for it?"
        if not self.started:
            self._lose(post, why)
            return True
        if post.num_deaths == MANY_DEATHS:
            self.note(f"{post.worker_id} does not come up: {why}")
            post.error = post.error or ErrorNote(name=WorkerStartError.__name__, message=why)
        return False

    def _see_crowds(self) -> None:
        """Two workers on one GPU: what came too much is lost."""
        gpus = {}
        for post in self:
            member = self._members.get(post.worker_id)
            if post.stage is Stage.READY and member is not None and member.gpu_uuid is not None:
                gpus[post.worker_id] = (member.gpu_uuid, self._teams[post.group].config.gpu_share)
        for uuid, worker_id, other in crowded_gpus(gpus):
            self._lose(self._posts[worker_id], f"{other} and {worker_id} share GPU {uuid}")

    # --- a step further --------------------------------------------------------------------------------------------

    def _step(self, post: Post) -> None:
        in_stage_s = self._now_s() - post.since_s
        match post.stage:
            case Stage.STARTING if in_stage_s > self._config.start_timeout_s and self.started:
                why = self._crew.why_waiting([post.worker_id])
                self._lose(post, f"not ready after {self._config.start_timeout_s:g} s{why and ': '}{why}")
                if why and self._teams[post.group].target > 1:  # it will find no place the next time either
                    self._teams[post.group].target -= 1
            case Stage.AWAY if in_stage_s > self._config.start_timeout_s and post.error is None:
                if why := self._crew.why_waiting([post.worker_id]):
                    post.error = ErrorNote(name=WorkerStartError.__name__, message=why)
            case Stage.DRAINING:
                self._drain_further(post, in_stage_s)
            case Stage.ENDING if in_stage_s > GRACE_S and self._is_gone(post, in_stage_s):
                self._remove(post)
            case _:
                pass
        if post.stage is Stage.LOST and self.started:
            self._remove(post)

    def _drain_further(self, post: Post, in_stage_s: float) -> None:
        """Leases first, then the worker's queue: what is leased may still be sent."""
        self._crew.stop_leases(post.worker_id)
        member = self._members.get(post.worker_id)
        late = in_stage_s > self._config.drain_timeout_s
        leased = member is not None and (member.state is WorkerState.READY or member.num_leases > 0)
        if leased and in_stage_s < LEASES_S:
            return
        if self._crew.drain(post.worker_id) or late:
            if late:
                self.note(
                    f"{post.worker_id} was not empty after {self._config.drain_timeout_s:g} s: ended all the same"
                )
            self._to(post, Stage.ENDING)

    def _is_gone(self, post: Post, in_stage_s: float) -> bool:
        self._crew.end(post.worker_id)
        sight = self._sights.get(post.worker_id)
        return sight is None or sight.life is Life.DEAD or in_stage_s > GRACE_S + END_TIMEOUT_S

    def _to(self, post: Post, stage: Stage) -> None:
        if post.stage is not stage:
            post.stage, post.since_s = stage, self._now_s()

    def _lose(self, post: Post, reason: str) -> None:
        if post.stage not in LEAVING:
            team = self._teams[post.group]
            if self.started:
                self.note(f"{post.worker_id} is lost: {reason}")
                team.lost_one(self._now_s())
        if post.error is None:
            post.error = ErrorNote(name=WorkerStartError.__name__, message=reason)
        self._to(post, Stage.LOST)

    def _remove(self, post: Post) -> None:
        self._crew.bury(post.worker_id)
        del self._posts[post.worker_id]
        self._members.pop(post.worker_id, None)
