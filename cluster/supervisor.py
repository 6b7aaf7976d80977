"""`Supervisor`: owns the workers' life. It starts, watches, replaces, drains and counts them; a plain class.

What it does to the world goes through a `Crew` (launching.py has Ray's); nothing here waits for long. Each `tick`
looks at all workers, then takes every one a step further:

    starting -> ready -> draining -> ending -> gone
        ^         |
        '-- away -'   its process died: Ray starts another, on another node if need be
                      (a worker that Ray gives up is `lost`, and a new one takes its place)
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from cluster.autoscaling import LoadSample
from cluster.config import PoolConfig
from cluster.crew import Crew, Life, Sight
from cluster.groups import GroupConfig
from cluster.nodes import crowded_gpus
from cluster.router import Member
from cluster.status import PoolStatus, Stage
from cluster.team import LEAVING, Post, Team
from encoder.errors import ConfigError, EncoderPoolError, WeightsError, WorkerStartError
from workers.messages import ErrorNote, WorkerState

logger = logging.getLogger(__name__)

TICK_S = 0.5
START_TICK_S = 0.05
LEASES_S = 5.0  # until a draining worker refuses what clients hold leases for
GRACE_S = 1.0  # after a worker's last item was settled: its answer is still on the way
END_TIMEOUT_S = 15.0  # until a process that should leave is killed
NUM_NOTES = 8


class Supervisor:
    """A pool's workers. Every method may come from any thread; `tick` from one at a time."""

    def __init__(
        self,
        config: PoolConfig,
        groups: Sequence[GroupConfig],
        crew: Crew,
        *,
        hooks: Sequence[Callable[[], object]] = (),
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`groups` are the configuration's, settled for this cluster; `hooks` run at each tick, and return soon."""
        self._config = config
        self._crew = crew
        self._hooks = list(hooks)
        self._now_s = now_s
        self._lock = threading.RLock()
        self._teams = {group.name: Team(group) for group in groups}
        self._posts: dict[str, Post] = {}
        self._sights: Mapping[str, Sight] = {}
        self._members: dict[str, Member] = {}
        self._num_refused = 0
        self._notes: list[str] = []
        self._started = False
        self._stop = threading.Event()

    # --- for others ----------------------------------------------------------------------------------------------

    def adopt(self, worker_ids: Iterable[str]) -> None:
        """Take over workers that an earlier supervisor of this pool has left. They are as many as it wanted."""
        with self._lock:
            found = Counter[str]()
            for worker_id in worker_ids:
                group = worker_id.rpartition("-")[0]
                self._teams[group].met(worker_id)
                self._post(worker_id, group)
                found[group] += 1
            for group, team in self._teams.items():
                team.target = found[group]
            self._started = True

    def start(self, until_s: float) -> None:
        """Launch the workers and wait until all of them can encode.

        Raises:
            ConfigError, WeightsError: what a worker says of its configuration.
            WorkerStartError: a worker that cannot start, or not all were ready in time.
        """
        self._advance()
        while True:
            self._observe()
            for post in self._posts.values():
                self._raise_failure(post)
            if all(post.stage is Stage.READY for post in self._posts.values()):
                break
            if self._now_s() > until_s:
                raise WorkerStartError(self._what_is_missing())
            if self._stop.wait(START_TICK_S):
                raise WorkerStartError("the pool was closed while it started")
        self._started = True

    def scale(self, num_workers: int, group: str | None = None) -> None:
        """Want so many workers; returns at once.

        Raises:
            ConfigError: no such group, or a number that cannot be.
            WorkerStartError: the cluster could never hold so many.
        """
        with self._lock:
            team = self._team(group)
            least, most = team.limits(is_alone=len(self._teams) == 1)
            if not least <= num_workers <= most:
                raise ConfigError(f"{team.config.name} may have {least} to {most} workers, got {num_workers}")
            self._check(team, num_workers)
            logger.info("%s: %d workers wanted instead of %d", team.config.name, num_workers, team.target)
            team.target = num_workers
            team.not_before_s = float("-inf")

    def drain(self, worker_id: str, *, replace: bool = False) -> None:
        """Take a worker away once it has finished what it has; returns at once. Raises ConfigError for an unknown one.

        `replace`: another one is started instead.
        """
        with self._lock:
            post = self._posts.get(worker_id)
            if post is None:
                known = ", ".join(sorted(self._posts)) or "none"
                raise ConfigError(f"no worker {worker_id!r} in this pool; it has {known}")
            if post.stage in LEAVING:
                return
            if not replace:
                team = self._teams[post.group]
                team.target = max(0, team.target - 1)
            self._leave(post)

    def status(self) -> PoolStatus:
        """How it stands, as of the last tick."""
        with self._lock:
            return PoolStatus(
                name=self._config.name,
                model=self._config.worker.encoder.model,
                started=self._started,
                targets={name: team.target for name, team in self._teams.items()},
                workers=tuple(post.status(self._members.get(post.worker_id)) for post in self._posts.values()),
                notes=tuple(self._notes),
            )

    def run(self) -> None:
        """Tick until stopped."""
        while not self._stop.wait(TICK_S):
            try:
                self.tick()
            except Exception:  # edge of a thread: the workers go on without us, the next tick may succeed
                logger.exception("the supervisor's tick failed")

    def stop(self) -> None:
        """End `run` and `start`."""
        self._stop.set()

    # --- a tick --------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Look at every worker and take each a step further."""
        self._observe()
        self._autoscale()
        self._advance()
        for hook in self._hooks:
            hook()

    def _observe(self) -> None:
        sights, members = self._crew.look(), self._crew.members()
        with self._lock:
            if members is not None:
                self._members = {member.worker_id: member for member in members}
                for worker_id in self._members.keys() - self._posts.keys():  # its last beat came after its end
                    self._crew.forget(worker_id)
            self._sights = sights
            for post in self._posts.values():
                sight = sights.get(post.worker_id, Sight(life=Life.DEAD, reason="its actor is gone"))
                self._see(post, sight, self._members.get(post.worker_id))
            self._see_crowds()

    def _see(self, post: Post, sight: Sight, member: Member | None) -> None:
        if post.stage is Stage.LOST:
            return
        if member is not None and member.incarnation != post.incarnation:
            post.num_restarts += post.incarnation is not None
            post.incarnation = member.incarnation
        if member is not None and (member.error is not None or post.stage is Stage.READY):
            post.error = member.error
        if sight.life is Life.DEAD:
            if post.stage is not Stage.ENDING:
                self._lose(post, sight.reason)
            return
        if post.stage in LEAVING:
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
                self._note(f"{post.worker_id} has not answered for {sight.silent_s:.0f} s: killed, it starts again")
                self._crew.restart(post.worker_id)
                self._to(post, Stage.AWAY)
            elif member is not None and member.state is WorkerState.READY:
                if post.stage is not Stage.READY:
                    self._teams[post.group].got_one()
                self._to(post, Stage.READY)
                post.was_ready = True
                post.error = None
            elif post.stage is Stage.READY and (member is None or member.state is not WorkerState.READY):
                self._to(post, Stage.AWAY)

    def _see_crowds(self) -> None:
        """Two workers on one GPU: what came too much is lost."""
        gpus = {}
        for post in self._posts.values():
            member = self._members.get(post.worker_id)
            if post.stage is Stage.READY and member is not None and member.gpu_uuid is not None:
                gpus[post.worker_id] = (member.gpu_uuid, self._teams[post.group].config.gpu_share)
        for uuid, worker_id, other in crowded_gpus(gpus):
            self._lose(self._posts[worker_id], f"{other} and {worker_id} share GPU {uuid}")

    def _autoscale(self) -> None:
        """Change the targets of groups that may grow and shrink by themselves."""
        if all(team.autoscaler is None for team in self._teams.values()):
            return
        num_refused = self._crew.num_refused()
        with self._lock:
            refused, self._num_refused = num_refused > self._num_refused, num_refused
            for team in self._teams.values():
                posts = [post for post in self._posts.values() if post.group == team.config.name]
                members = [self._members[post.worker_id] for post in posts if post.worker_id in self._members]
                in_flight_ms = sum(member.in_flight_ms for member in members)
                sample = LoadSample(time_s=self._now_s(), in_flight_ms=in_flight_ms, refused=refused)
                wanted = team.wanted(posts, sample)
                if wanted != team.target:
                    self._try_target(team, wanted, f"{in_flight_ms:.0f} ms in flight")

    def _try_target(self, team: Team, wanted: int, why: str) -> None:
        try:
            self._check(team, wanted)
        except WorkerStartError as error:
            self._note(f"{team.config.name} should have {wanted} workers ({why}): {error}")
            return
        logger.warning("%s: %d workers instead of %d, %s", team.config.name, wanted, team.target, why)
        team.target = wanted

    def _check(self, team: Team, num_workers: int) -> None:
        """Raises WorkerStartError when the cluster could never hold so many."""
        if num_workers > team.target:
            wanted = {name: each.target for name, each in self._teams.items()} | {team.config.name: num_workers}
            self._crew.check(
                each.config.model_copy(update={"num_workers": wanted[name]}) for name, each in self._teams.items()
            )

    def _advance(self) -> None:
        with self._lock:
            for post in list(self._posts.values()):
                self._step(post)
            for name, team in self._teams.items():
                self._level(name, team)

    def _step(self, post: Post) -> None:
        in_stage_s = self._now_s() - post.since_s
        match post.stage:
            case Stage.STARTING if in_stage_s > self._config.start_timeout_s and self._started:
                why = self._crew.why_waiting([post.worker_id])
                self._lose(post, f"not ready after {self._config.start_timeout_s:g} s{why and ': '}{why}")
                if why and self._teams[post.group].target > 1:  # it will find no place the next time either
                    self._teams[post.group].target -= 1
            case Stage.DRAINING:
                self._drain_further(post, in_stage_s)
            case Stage.ENDING if in_stage_s > GRACE_S and self._is_gone(post, in_stage_s):
                self._remove(post)
            case _:
                pass
        if post.stage is Stage.LOST and self._started:
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
                self._note(
                    f"{post.worker_id} was not empty after {self._config.drain_timeout_s:g} s: ended all the same"
                )
            self._to(post, Stage.ENDING)

    def _is_gone(self, post: Post, in_stage_s: float) -> bool:
        self._crew.end(post.worker_id)
        sight = self._sights.get(post.worker_id)
        return sight is None or sight.life is Life.DEAD or in_stage_s > GRACE_S + END_TIMEOUT_S

    def _level(self, name: str, team: Team) -> None:
        """Launch or take away as many workers as there are too few or too many."""
        staying = [post for post in self._posts.values() if post.group == name and post.stage not in LEAVING]
        if len(staying) < team.target and self._now_s() >= team.not_before_s:
            for _ in range(team.target - len(staying)):
                worker_id = team.next_id()
                self._crew.launch(worker_id, team.config)
                self._post(worker_id, name)
        staying.sort(key=lambda post: (post.stage is Stage.READY, -post.number))
        for post in staying[: max(0, len(staying) - team.target)]:
            self._leave(post)

    # --- posts ---------------------------------------------------------------------------------------------------

    def _post(self, worker_id: str, group: str) -> None:
        self._posts[worker_id] = Post(worker_id=worker_id, group=group, stage=Stage.STARTING, since_s=self._now_s())

    def _to(self, post: Post, stage: Stage) -> None:
        if post.stage is not stage:
            post.stage, post.since_s = stage, self._now_s()

    def _leave(self, post: Post) -> None:
        """Drain it, or end it at once if it never took part."""
        self._crew.stop_leases(post.worker_id)
        self._to(post, Stage.DRAINING if post.was_ready or post.worker_id in self._members else Stage.LOST)

    def _lose(self, post: Post, reason: str) -> None:
        if post.stage not in LEAVING:
            team = self._teams[post.group]
            if self._started:
                self._note(f"{post.worker_id} is lost: {reason}")
                team.lost_one(self._now_s())
        if post.error is None:
            post.error = ErrorNote(name=WorkerStartError.__name__, message=reason)
        self._to(post, Stage.LOST)

    def _remove(self, post: Post) -> None:
        self._crew.bury(post.worker_id)
        del self._posts[post.worker_id]
        self._members.pop(post.worker_id, None)

    def _note(self, text: str) -> None:
        logger.warning("%s", text)
        self._notes = [*self._notes, text][-NUM_NOTES:]

    # --- targets -------------------------------------------------------------------------------------------------

    def _team(self, group: str | None) -> Team:
        if group is None and len(self._teams) == 1:
            return next(iter(self._teams.values()))
        if group is None or group not in self._teams:
            known = ", ".join(self._teams)
            said = "say which group" if group is None else f"no group {group!r}"
            raise ConfigError(f"{said}; this pool has {known}")
        return self._teams[group]

    # --- a start that fails --------------------------------------------------------------------------------------

    def _raise_failure(self, post: Post) -> None:
        if post.stage is Stage.LOST and post.error is not None:
            raise WorkerStartError(f"{post.worker_id} could not start: {post.error.message}")
        if post.error is not None:
            raise start_error(post.worker_id, post.error)

    def _what_is_missing(self) -> str:
        late = sorted(post.worker_id for post in self._posts.values() if post.stage is not Stage.READY)
        why = self._crew.why_waiting(late) or f"{', '.join(late)} still loading"
        return f"after {self._config.start_timeout_s:g} s {why}; free the resources, or raise start_timeout_s"


def start_error(worker_id: str, note: ErrorNote) -> EncoderPoolError:
    """What a worker says of its start: the user's mistakes keep their type."""
    error = note.to_error()
    kind = type(error) if isinstance(error, ConfigError | WeightsError) else WorkerStartError
    return kind(f"{worker_id} could not start: {note.name}: {note.message}")
