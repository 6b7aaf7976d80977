"""Pools that live on without a program of their own: `encpool up` raises one, `encpool down` ends it.

Everything of such a pool is a detached, named actor: `NAME.supervisor`, `NAME.router`, `NAME.worker-0`... The
supervisor's process may die: Ray starts it again, and it finds the workers by the names of their placement groups.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import remove_placement_group

from cluster.config import PoolConfig
from cluster.groups import GroupConfig
from cluster.lifecycle.actors import NAMESPACE, ROUTER, SUPERVISOR, actor_name, find_actor, parts_of, pools_here
from cluster.lifecycle.launching import RayCrew
from cluster.lifecycle.places import places_of
from cluster.lifecycle.processes import born
from cluster.lifecycle.status import PoolStatus
from cluster.lifecycle.supervisor import Supervisor
from cluster.planning.fleet import replanning
from cluster.routing.roster import Member
from encoder.adapters.registry import check_model
from encoder.errors import ConfigError, EncoderPoolError, PoolClosedError, WorkerLostError, WorkerStartError
from workers.messages import ErrorNote, WorkerReport
from workers.process import set_up_process

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 10.0
REPORT_TIMEOUT_S = 2.0
CLEAR_TIMEOUT_S = 20.0
POLL_S = 0.2
RETRY_S = 1.0
FIRST_ANSWER_S = 60.0  # for the supervisor's own process to start


class SupervisorActor:
    """The `Supervisor` of a pool in a process of its own. Runs as a Ray actor without a GPU."""

    def __init__(self, config: PoolConfig, groups: Sequence[GroupConfig]) -> None:
        """`groups` are settled already: a restart must not decide otherwise while a node is away."""
        set_up_process("encpool-supervisor")
        self._config = config
        self._crew = RayCrew(config.name, config, detached=True)
        router = self._crew.start_router()
        follow = replanning(config, groups, config.name, router)
        self._supervisor = Supervisor(config, groups, self._crew, follow)
        self._failure: ErrorNote | None = None
        threading.Thread(target=self._main, name="supervisor", daemon=True).start()

    def config(self) -> PoolConfig:
        """What the pool was raised with."""
        return self._config

    def status(self) -> PoolStatus:
        """See `Supervisor.status`."""
        return replace(self._supervisor.status(), failure=self._failure)

    def scale(self, num_workers: int, group: str | None) -> None:
        """See `Supervisor.scale`."""
        self._supervisor.scale(num_workers, group)

    def drain(self, worker_id: str, replace: bool) -> None:
        """See `Supervisor.drain`."""
        self._supervisor.drain(worker_id, replace=replace)

    def _main(self) -> None:
        found = self._find_workers()
        try:
            if found:
                logger.warning("the supervisor of pool %r is back and finds %s", self._config.name, ", ".join(found))
                self._supervisor.adopt(found)
            else:
                self._supervisor.start(time.monotonic() + self._config.start_timeout_s)
        except Exception as error:  # edge of a thread: who waits for the start, or looks, reads it in the status
            logger.warning("pool %r could not start: %s", self._config.name, error)
            self._failure = ErrorNote.of(error, otherwise=WorkerStartError)
            return
        self._supervisor.run()

    def _find_workers(self) -> list[str]:
        """Those that an earlier life of this actor has left."""
        while True:
            try:
                return self._crew.adopt()
            except RayError as error:  # nobody else would look after them
                logger.warning("the cluster does not say which workers there are: %s", type(error).__name__)
                time.sleep(RETRY_S)


class SupervisorCalls:
    """The way to the supervisor of a standing pool."""

    def __init__(self, pool: str) -> None:
        """Raises ConfigError when no such pool stands."""
        self._pool = pool
        try:
            self._handle = find_actor(pool, SUPERVISOR)
        except ValueError:
            here = ", ".join(map(repr, pools_here()))
            raise ConfigError(
                f"no pool {pool!r} is running on this cluster{f'; running: {here}' if here else ''}"
            ) from None

    def config(self) -> PoolConfig:
        """See `SupervisorActor.config`."""
        config: PoolConfig = self._call("config")
        return config

    def status(self) -> PoolStatus:
        """See `Supervisor.status`."""
        status: PoolStatus = self._call("status")
        return status

    def scale(self, num_workers: int, group: str | None = None) -> None:
        """See `Supervisor.scale`."""
        self._call("scale", num_workers, group)

    def drain(self, worker_id: str, *, replace: bool = False) -> None:
        """See `Supervisor.drain`."""
        self._call("drain", worker_id, replace)

    def _call(self, method: str, *arguments: object) -> Any:
        """Raises what the supervisor raises, WorkerLostError when it does not answer, PoolClosedError if it is gone."""
        until_s = time.monotonic() + FIRST_ANSWER_S
        while True:
            try:
                return ray.get(getattr(self._handle, method).remote(*arguments), timeout=CALL_TIMEOUT_S)
            except RayTaskError as error:
                if isinstance(error.cause, EncoderPoolError):
                    raise error.cause from None  # without the actor's traceback
                raise
            except ActorDiedError as error:
                raise PoolClosedError(f"pool {self._pool!r} was ended") from error
            except (RayActorError, GetTimeoutError) as error:  # it starts, restarts, or is stuck
                if time.monotonic() > until_s:
                    said = type(error).__name__
                    raise WorkerLostError(f"the supervisor of pool {self._pool!r} does not answer ({said})") from error
                time.sleep(POLL_S)


def raise_pool(config: PoolConfig, *, watch: Callable[[PoolStatus], None] = lambda status: None) -> PoolStatus:
    """Start a standing pool called `config.name` on the connected cluster, and wait until it is ready.

    Args:
        watch: hears how it stands, a few times a second.

    Raises:
        ConfigError: a pool of that name stands already, or the configuration cannot work.
        WeightsError, WorkerStartError: as `EncoderPool.start` does. Nothing is left behind then.
    """
    for group in config.worker_groups:
        check_model(group.worker.encoder)  # fails in milliseconds for what no worker could load
    groups = RayCrew(config.name, config, detached=True).settle()
    remote: Any = ray.remote  # its type hints lack some options
    supervisor = remote(num_cpus=0, max_restarts=-1, max_concurrency=8)(SupervisorActor)
    try:
        supervisor.options(name=actor_name(config.name, SUPERVISOR), namespace=NAMESPACE, lifetime="detached").remote(
            config, groups
        )
    except ValueError as error:
        raise ConfigError(
            f"a pool {config.name!r} is running already; end it with `encpool down {config.name}`, "
            f"or choose another name with --name"
        ) from error
    try:
        calls = SupervisorCalls(config.name)
        until_s = time.monotonic() + config.start_timeout_s + FIRST_ANSWER_S  # it may die on the way and begin anew
        while not ((status := calls.status()).started and status.settled):
            watch(status)
            if status.failure is not None:
                raise status.failure.to_error()
            if time.monotonic() > until_s:
                raise WorkerStartError(f"{status.num_ready} of {config.num_workers} workers were ready in time")
            time.sleep(POLL_S)
    except BaseException:
        clear_pool(config.name)
        raise
    return status


def end_pool(pool: str) -> None:
    """End a standing pool and everything of it. Raises ConfigError for an unknown one, WorkerLostError for remains."""
    SupervisorCalls(pool)
    left = clear_pool(pool)
    if left:
        raise WorkerLostError(f"pool {pool!r} was ended, but is still there: {', '.join(left)}")


def clear_pool(pool: str) -> list[str]:
    """Kill every actor of a pool, whoever started it, and free every place. Returns what is left after a while."""
    parts = sorted(parts_of(pool), key=lambda part: part != SUPERVISOR)  # first who would start others again
    processes = _processes(pool, parts)
    for part in parts:
        try:
            ray.kill(find_actor(pool, part))
        except ValueError:  # it has gone meanwhile
            continue
    for place in places_of(pool):
        remove_placement_group(place.handle)
    until_s = time.monotonic() + CLEAR_TIMEOUT_S
    while True:
        left = [actor_name(pool, part) for part in parts_of(pool)]
        left += [f"placement group of {place.worker_id}" for place in places_of(pool)]
        left += [f"process {pid}" for pid in processes if born(pid) is not None]
        if not left or time.monotonic() > until_s:
            return left
        time.sleep(0.1)


def _processes(pool: str, parts: Iterable[str]) -> set[int]:
    """Process ids of a pool's workers on this machine: of those that answer, and of those that the router knows.

    One that is stuck answers nobody; Ray takes some seconds to kill it, and it holds its GPU's memory until then.
    """
    calls = []
    for part in parts:
        with suppress(ValueError):
            handle = find_actor(pool, part)
            if hasattr(handle, "report"):
                calls.append(handle.report.remote())
            elif part == ROUTER:
                calls.append(handle.members.remote())
    done = ray.wait(calls, num_returns=len(calls), timeout=REPORT_TIMEOUT_S)[0] if calls else []
    known: list[Member | WorkerReport] = []
    for call in done:
        with suppress(RayError):
            answer = ray.get(call)
            known += answer if isinstance(answer, list) else [answer]
    return {one.pid for one in known if one.host == socket.gethostname()}
