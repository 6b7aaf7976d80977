"""`Supervisor`: owns the workers' life. It starts, watches, replaces, drains and counts them; a plain class.

What it does to the world goes through a `Crew` (launching.py has Ray's); nothing here waits for long. Each `tick`
looks at all workers, takes every one a step further (posts.py), and starts or takes away as many as there are too few
or too many.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from cluster.config import PoolConfig
from cluster.groups import GroupConfig
from cluster.lifecycle.autoscaling import LoadSample
from cluster.lifecycle.crew import Crew
from cluster.lifecycle.posts import Posts
from cluster.lifecycle.status import PoolStatus, Stage
from cluster.lifecycle.team import LEAVING, Post, Team
from cluster.planning.replanning import Replanning
from encoder.errors import ConfigError, EncoderPoolError, PoolClosedError, WeightsError, WorkerStartError
from workers.messages import ErrorNote

logger = logging.getLogger(__name__)

TICK_S = 0.5
START_TICK_S = 0.05


class Supervisor:
    """A pool's workers. Every method may come from any thread; `tick` from one at a time."""

    def __init__(
        self,
        config: PoolConfig,
        groups: Sequence[GroupConfig],
        crew: Crew,
        replanning: Replanning | None = None,
        *,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`groups` are the configuration's, settled for this cluster; `replanning` is ticked along."""
        self._config = config
        self._crew = crew
        self._replanning = replanning or Replanning(())
        self._now_s = now_s
        self._lock = threading.RLock()
        self._teams = {group.name: Team(group, is_alone=len(groups) == 1) for group in groups}
        self._posts = Posts(config, crew, self._teams, now_s)
        self._num_refused: int | None = None  # as the router said last
        self._stop = threading.Event()

    # --- for others ----------------------------------------------------------------------------------------------

    def adopt(self, worker_ids: Iterable[str]) -> None:
        """Take over workers that an earlier supervisor of this pool has left. They are as many as it wanted."""
        with self._lock:
            found = Counter[str]()
            for worker_id in worker_ids:
                group = worker_id.rpartition("-")[0]
                self._teams[group].met(worker_id)
                self._posts.add(worker_id, group)
                found[group] += 1
            for group, team in self._teams.items():
                team.target = found[group]
            self._posts.started = True

    def start(self, until_s: float) -> None:
        """Launch the workers and wait until all of them can encode.

        Raises:
            ConfigError, WeightsError: what a worker says of its configuration.
            WorkerStartError: a worker that cannot start, or not all were ready in time.
        """
        self._advance()
        while True:
            self._observe()
            for post in self._posts:
                _raise_failure(post)
            if all(post.stage is Stage.READY for post in self._posts):
                break
            if self._now_s() > until_s:
                raise WorkerStartError(self._what_is_missing())
            if self._stop.wait(START_TICK_S):
                raise WorkerStartError("the pool was closed while it started")
        self._posts.started = True

    def scale(self, num_workers: int, group: str | None = None) -> None:
        """Want so many workers; returns at once.

        Raises:
            ConfigError: no such group, or a number that cannot be.
            WorkerStartError: the cluster could never hold so many.
        """
        with self._lock:
            team = self._team(group)
            least, most = team.limits
            # A number of another kind would break every tick from now on, and nobody would look after the workers.
            if not isinstance(num_workers, int) or not least <= num_workers <= most:
                raise ConfigError(f"{team.title} may have {least} to {most} workers, got {num_workers!r}")
            self._check(team, num_workers)
            logger.info("%s: %d workers wanted instead of %d", team.title, num_workers, team.target)
            team.target = num_workers
            team.not_before_s = float("-inf")

    def drain(self, worker_id: str, *, replace: bool = False) -> None:
        """Take a worker away once it has finished what it has; returns at once. Raises ConfigError for an unknown one.

        `replace`: another one is started instead.
        """
        with self._lock:
            post = self._posts.get(worker_id)
            if post is None:
                known = ", ".join(sorted(post.worker_id for post in self._posts)) or "none"
                raise ConfigError(f"no worker {worker_id!r} in this pool; it has {known}")
            if post.stage in LEAVING:
                return
            if not replace:
                team = self._teams[post.group]
                team.target = max(0, team.target - 1)
            self._posts.leave(post)

    def status(self) -> PoolStatus:
        """How it stands, as of the last tick."""
        with self._lock:
            return PoolStatus(
                name=self._config.name,
                started=self._posts.started,
                targets={name: team.target for name, team in self._teams.items()},
                models={name: team.config.worker.encoder.model for name, team in self._teams.items()},
                workers=tuple(post.status(self._posts.member(post)) for post in self._posts),
                notes=tuple(self._posts.notes),
                replanning=self._replanning.decisions(),
            )

    def run(self) -> None:
        """Tick until stopped."""
        while not self._stop.wait(TICK_S):
            try:
                self.tick()
            except PoolClosedError as error:  # there is nobody left to look after
                logger.warning("nobody looks after the workers any more: %s", error)
                return
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
        self._replanning.tick()

    def _observe(self) -> None:
        sights, members = self._crew.look(), self._crew.members()
        with self._lock:
            self._posts.observe(sights, members)

    def _autoscale(self) -> None:
        """Change the targets of groups that may grow and shrink by themselves."""
        if all(team.autoscaler is None for team in self._teams.values()):
            return
        num_refused = self._crew.num_refused()
        if num_refused is None:  # the router is away: nobody's load is known
            return
        with self._lock:
            refused = self._num_refused is not None and num_refused > self._num_refused
            self._num_refused = num_refused
            for team in self._teams.values():
                posts = [post for post in self._posts if post.group == team.config.name]
                members = [self._posts.member(post) for post in posts]
                in_flight_ms = sum(member.in_flight_ms for member in members if member is not None)
                sample = LoadSample(time_s=self._now_s(), in_flight_ms=in_flight_ms, refused=refused)
                wanted = team.wanted(posts, sample)
                if wanted != team.target:
                    self._try_target(team, wanted, f"{in_flight_ms:.0f} ms in flight")

    def _try_target(self, team: Team, wanted: int, why: str) -> None:
        try:
            self._check(team, wanted)
        except WorkerStartError as error:
            self._posts.note(f"{team.title} should have {wanted} workers ({why}): {error}")
            return
        logger.warning("%s: %d workers instead of %d, %s", team.title, wanted, team.target, why)
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
            self._posts.advance()
            for name, team in self._teams.items():
                self._level(name, team)

    def _level(self, name: str, team: Team) -> None:
        """Launch or take away as many workers as there are too few or too many."""
        staying = [post for post in self._posts if post.group == name and post.stage not in LEAVING]
        if len(staying) < team.target and self._now_s() >= team.not_before_s:
            for _ in range(team.target - len(staying)):
                worker_id = team.next_id()
                self._crew.launch(worker_id, team.config)
                self._posts.add(worker_id, name)
        staying.sort(key=lambda post: (post.stage is Stage.READY, -post.number))
        for post in staying[: max(0, len(staying) - team.target)]:
            self._posts.leave(post)

    # --- targets -------------------------------------------------------------------------------------------------

    def _team(self, group: str | None) -> Team:
        if group is None and len(self._teams) == 1:
            return next(iter(self._teams.values()))
        if group is None or group not in self._teams:
            known = ", ".join(self._teams) if self._config.groups else "no groups"
            said = "say which group" if group is None else f"no group {group!r}"
            raise ConfigError(f"{said}; this pool has {known}")
        return self._teams[group]

    def _what_is_missing(self) -> str:
        late = sorted(post.worker_id for post in self._posts if post.stage is not Stage.READY)
        dying = sorted(post.worker_id for post in self._posts if post.stage is Stage.AWAY)
        loading = (
            f"the process of {', '.join(dying)} dies as it starts" if dying else f"{', '.join(late)} still loading"
        )
        why = self._crew.why_waiting(late) or loading
        return f"after {self._config.start_timeout_s:g} s {why}; free the resources, or raise start_timeout_s"


def _raise_failure(post: Post) -> None:
    """What a worker's first start came to, if that is nothing good."""
    if post.stage is Stage.LOST and post.error is not None:
        raise WorkerStartError(f"{post.worker_id} could not start: {post.error.message}")
    if post.error is not None:
        raise start_error(post.worker_id, post.error)


def start_error(worker_id: str, note: ErrorNote) -> EncoderPoolError:
    """What a worker says of its start: the user's mistakes keep their type."""
    error = note.to_error()
    kind = type(error) if isinstance(error, ConfigError | WeightsError) else WorkerStartError
    return kind(f"{worker_id} could not start: {note.name}: {note.message}")
