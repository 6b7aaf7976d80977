"""`EncoderPool`: what a program holds of a running pool. It encodes, looks on, and changes the number of workers."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, nullcontext
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError, RayError

from cluster.client import Client, clients_of
from cluster.config import PoolConfig, load_config
from cluster.lifecycle import local_ray
from cluster.lifecycle.actors import ROUTER, WorkerHandles, find_actor
from cluster.lifecycle.launching import RayCrew
from cluster.lifecycle.standing import SupervisorCalls
from cluster.lifecycle.stats import PoolStats
from cluster.lifecycle.status import PoolStatus, wait_until
from cluster.lifecycle.supervisor import Supervisor
from cluster.planning.fleet import RayFleet, replanning
from cluster.routing.roster import Member
from cluster.streams.gate import Gate
from cluster.streams.outcomes import Embedding, Outcome
from cluster.streams.sources import Source
from cluster.streams.transport import RayTransport
from encoder.adapters.registry import check_model
from encoder.errors import ConfigError, PoolClosedError, WorkerLostError
from workers.messages import TracedItem
from workers.metrics import samples_of
from workers.priority import Priority
from workers.prometheus import render
from workers.ray_metrics import RayExporter
from workers.samples import Sample

logger = logging.getLogger(__name__)

POLL_S = 0.05
ROUTER_TIMEOUT_S = 10.0
REPORT_TIMEOUT_S = 2.0


class EncoderPool:
    """A running pool: `start` makes one that ends with it, `connect` finds one that stays. A `with` block closes it."""

    def __init__(
        self,
        config: PoolConfig,
        name: str,
        router: Any,
        control: Supervisor | SupervisorCalls,
        *,
        gate: Gate,
        undo: ExitStack,
    ) -> None:
        """See `start`. Every call goes through `gate`; what `undo` holds is the pool's, for `close` to do."""
        self.config = config
        self.name = name
        self._router = router
        self._control = control
        self._gate = gate
        self._workers = WorkerHandles(name)
        self._recorder = uuid.uuid4().hex
        self._workers.keep([worker.worker_id for worker in control.status().workers])
        transport = RayTransport(
            router, self._workers, timeout_s=ROUTER_TIMEOUT_S, max_shared_bytes=config.max_shared_bytes, gate=gate
        )
        exporter = RayExporter()
        self._clients = clients_of(
            config,
            transport,
            num_workers=transport.num_workers,
            export=lambda meter: exporter.export(meter.samples),
        )
        self._undo = undo.pop_all()

    @classmethod
    def start(cls, config: PoolConfig | str | Path) -> EncoderPool:
        """Start the router and the workers, and wait until all of them can encode.

        The configuration may be the path of a YAML file.

        Uses the Ray cluster this process is connected to, else `ray_address`, else RAY_ADDRESS, else starts a local
        one, which ends with the pool.

        Raises:
            ConfigError: no such model, or a layout that cannot work.
            WeightsError: a checkpoint that lacks tensors or has others.
            WorkerStartError: no Ray at the address, resources that the cluster does not have or that are not free, a
                worker that could not load, capture or answer its probe, or that did not within `start_timeout_s`.
        """
        started_s = time.monotonic()
        if not isinstance(config, PoolConfig):
            config = load_config(config)
        for group in config.worker_groups:
            check_model(group.worker.encoder)  # fails in milliseconds for what no worker could load
        name = f"pool-{uuid.uuid4().hex[:8]}"
        with ExitStack() as undo:
            gate = _gate_before(local_ray.connect(config), undo)
            crew = RayCrew(name, config, detached=False)
            undo.callback(crew.close)
            groups = crew.settle()
            router = crew.start_router()
            supervisor = Supervisor(config, groups, crew, replanning(config, groups, name, router))
            supervisor.start(started_s + config.start_timeout_s)
            thread = threading.Thread(target=supervisor.run, name=f"{name}-supervisor", daemon=True)
            thread.start()
            undo.callback(thread.join)
            undo.callback(supervisor.stop)
            pool = cls(config, name, router, supervisor, gate=gate, undo=undo)
        logger.info("%s ready: %d workers in %.1f s", name, config.num_workers, time.monotonic() - started_s)
        return pool

    @classmethod
    def connect(cls, name: str = "default", address: str | None = None) -> EncoderPool:
        """Use a pool that `encpool up` has raised, as many programs may at once. Closing this leaves it as it is.

        Args:
            address: its Ray cluster; the one this process is connected to, RAY_ADDRESS, or the one that `encpool up`
                has started on this machine, when left out. This machine must be a node of it.

        Raises:
            ConfigError: no such pool.
            WorkerStartError: no such cluster.
        """
        with ExitStack() as undo:
            gate = _gate_before(local_ray.attach(address), undo)
            calls = SupervisorCalls(name)
            return cls(calls.config(), name, find_actor(name, ROUTER), calls, gate=gate, undo=undo)

    @property
    def client(self) -> Client:
        """What encodes through this pool with its first model, for those who bring streams of their own."""
        return next(iter(self._clients.values()))

    def client_for(self, model: str | None) -> Client:
        """What encodes with this model. Raises ConfigError for one that the pool has not, or None if it has several."""
        if model is None and len(self._clients) == 1:
            return self.client
        if isinstance(model, str) and model in self._clients:
            return self._clients[model]
        named = "it has several models" if model is None else f"no model {model!r} in this pool"
        raise ConfigError(f"{named}; choose one of {', '.join(self._clients)}")

    def encode(
        self,
        source: Source,
        *,
        model: str | None = None,
        timeout_s: float | None = None,
        priority: str = Priority.INTERACTIVE,
        scope: str | None = "",
    ) -> Embedding:
        """Encode one image, given as a path or as its bytes, with the pool's model or this one of several.

        Raises its typed error.
        """
        return self.client_for(model).encode(source, timeout_s=timeout_s, priority=priority, scope=scope)

    def encode_many(
        self,
        sources: Iterable[Source],
        *,
        model: str | None = None,
        timeout_s: float | None = None,
        priority: str = Priority.BATCH,
        scope: str | None = "",
    ) -> Generator[Outcome, None, None]:
        """Outcomes in the order of the sources, streamed with bounded memory. See `Client.encode_many`.

        Raises:
            ConfigError: no such model in this pool, or none named where it has several.
            TypeError: a single path or bytes object, whose pieces are no sources.
        """
        if isinstance(sources, str | bytes | bytearray | memoryview | Path):
            raise TypeError("encode_many takes many paths or bytes objects; encode takes a single one")
        return self.client_for(model).encode_many(sources, timeout_s=timeout_s, priority=priority, scope=scope)

    def members(self) -> list[Member]:
        """The workers as the router knows them. Raises WorkerLostError when it does not answer, PoolClosedError."""
        members: list[Member] = self._ask_router("members")
        return members

    def _ask_router(self, what: str) -> Any:
        until_s = time.monotonic() + ROUTER_TIMEOUT_S
        while True:
            try:
                with self._gate:
                    return ray.get(getattr(self._router, what).remote(), timeout=ROUTER_TIMEOUT_S)
            except ActorDiedError as error:  # not one that restarts
                raise PoolClosedError(f"pool {self.name!r} was ended") from error
            except (RayActorError, GetTimeoutError) as error:  # it restarts, or is stuck
                if time.monotonic() > until_s:
                    raise WorkerLostError(f"the router does not answer ({type(error).__name__})") from error
                time.sleep(POLL_S)

    def stats(self) -> PoolStats:
        """Counts of every worker that answers within two seconds. Raises as `members` does."""
        members = self.members()
        reports = []
        with self._gate:
            self._workers.keep([member.worker_id for member in members])
            calls = [worker.report.remote() for worker in self._workers.handles()]
            done = ray.wait(calls, num_returns=len(calls), timeout=REPORT_TIMEOUT_S)[0] if calls else []
            for call in done:
                try:
                    reports.append(ray.get(call, timeout=REPORT_TIMEOUT_S))
                except RayError as error:
                    logger.info("a worker does not report: %s", type(error).__name__)
        return PoolStats(num_workers=len(self._workers), members=tuple(members), reports=tuple(reports))

    def take_trace(self) -> tuple[TracedItem, ...]:
        """What was encoded since the last call, by whomever: for a caller who calls every few seconds.

        Raises PoolClosedError.
        """
        with self._gate:
            return RayFleet(self.name, self._router).take_trace(self._recorder)

    def status(self) -> PoolStatus:
        """The workers as their supervisor sees them. Raises as `members` does."""
        with self._gate:
            return self._control.status()

    def metrics(self, *more: Iterable[Sample]) -> str:
        """What router, workers and this client have counted, in Prometheus's text format. Raises as `members` does.

        `more` is what the caller counted under names of `workers.metric_names`.
        """
        stats = self.stats()
        router: list[Sample] = self._ask_router("samples")
        return render(chain(*map(samples_of, stats.reports), router, self.client.meter.samples(), *more))

    def scale(self, num_workers: int, group: str | None = None, *, timeout_s: float | None = None) -> None:
        """Change the number of workers, and wait until it is so. Work goes on; who leaves finishes what it has.

        Args:
            group: whose number, in a pool of several groups.
            timeout_s: how long to wait; the configuration's `start_timeout_s` plus `drain_timeout_s` when left out.

        Raises:
            ConfigError: no such group, or a number that it cannot have.
            WorkerStartError: the cluster does not have the resources, or has them not free, or it took too long.
        """
        with self._gate:
            self._control.scale(num_workers, group)
        self._wait_until(lambda status: status.settled, timeout_s)

    def drain(self, worker_id: str, *, replace: bool = False, timeout_s: float | None = None) -> None:
        """Take one worker away, once it has finished what it has, and wait until it is gone.

        Args:
            replace: start another one instead; otherwise the pool wants one worker less.

        Raises:
            ConfigError: no such worker.
            WorkerStartError: as `scale` does.
        """
        with self._gate:
            self._control.drain(worker_id, replace=replace)
        self._wait_until(
            lambda status: status.settled and all(worker.worker_id != worker_id for worker in status.workers), timeout_s
        )

    def _wait_until(self, done: Callable[[PoolStatus], bool], timeout_s: float | None) -> None:
        if timeout_s is None:
            timeout_s = self.config.start_timeout_s + self.config.drain_timeout_s
        wait_until(done, self.status, timeout_s=timeout_s)

    def close(self) -> None:
        """End every actor, and Ray itself with the last pool that needs it. Work under way raises PoolClosedError."""
        for client in self._clients.values():
            client.closed = True
        if self._gate.close():
            self._undo.close()

    def __enter__(self) -> EncoderPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _gate_before(own: local_ray.OwnRay | None, undo: ExitStack) -> Gate:
    """The gate of calls to Ray, which is left once nobody is inside; `own` is our connection, if it is ours to end."""
    gate = Gate(connected=ray.is_initialized)
    undo.enter_context(own or nullcontext())
    undo.callback(gate.wait_empty, ROUTER_TIMEOUT_S)
    return gate
