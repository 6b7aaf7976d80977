"""`EncoderPool`: starts the router and the workers, watches their start, and encodes through them."""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections import Counter
from collections.abc import Generator, Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from cluster import local_ray
from cluster.client import Client, Embedding, Outcome, Source
from cluster.config import PoolConfig, load_config
from cluster.router import Member, RouterActor
from cluster.transport import Gate, RayTransport
from encoder.adapters.registry import load_adapter
from encoder.errors import ConfigError, EncoderPoolError, WeightsError, WorkerLostError, WorkerStartError
from workers.actor import worker_actor_class
from workers.cache import CacheStats
from workers.config import WorkerConfig
from workers.messages import ErrorNote, WorkerReport, WorkerState

logger = logging.getLogger(__name__)

NAMESPACE = "encpool"
POLL_S = 0.05
ROUTER_TIMEOUT_S = 10.0
REPORT_TIMEOUT_S = 2.0


@dataclass(frozen=True, kw_only=True)
class PoolStats:
    """Counts of all workers that answered, each since its own start."""

    num_workers: int
    members: tuple[Member, ...]
    reports: tuple[WorkerReport, ...]  # of the workers that answered in time

    @cached_property
    def num_ready(self) -> int:
        """Workers that the router would send work to."""
        return sum(member.leasable for member in self.members)

    @cached_property
    def num_items(self) -> int:
        """Items settled, failed ones included."""
        return sum(report.stats.num_items for report in self.reports)

    @cached_property
    def segment_hits(self) -> int:
        """Segments that a graph served."""
        return sum(report.stats.segment_hits for report in self.reports)

    @cached_property
    def segment_misses(self) -> dict[str, int]:
        """Segments that ran eagerly, by reason."""
        total: Counter[str] = Counter()
        for report in self.reports:
            total.update(report.stats.segment_misses or {})
        return dict(total)

    @cached_property
    def hit_rate(self) -> float:
        """Share of segments that a graph served."""
        num_segments = self.segment_hits + sum(self.segment_misses.values())
        return self.segment_hits / num_segments if num_segments else 0.0

    @cached_property
    def cache(self) -> CacheStats:
        """What the workers' caches did and hold together."""
        each = [asdict(report.stats.cache) for report in self.reports]
        return CacheStats(**{name: sum(stats[name] for stats in each) for name in asdict(CacheStats())})

    @cached_property
    def fill(self) -> float:
        """Useful rows of replays over rows run."""
        run = sum(report.stats.run_patches for report in self.reports)
        return sum(report.stats.useful_patches for report in self.reports) / run if run else 0.0


class EncoderPool:
    """A running pool. `start` makes one; a `with` block closes it."""

    def __init__(self, config: PoolConfig, router: Any, workers: dict[str, Any], client: Client, gate: Gate) -> None:
        """See `start`."""
        self.config = config
        self._router = router
        self._workers = workers  # actor handles by worker id
        self._client = client
        self._gate = gate
        self._ray: local_ray.OwnRay | None = None

    @classmethod
    def start(cls, config: PoolConfig | str | Path) -> EncoderPool:
        """Start the router and the workers, and wait until all of them can encode.

        The configuration may be the path of a YAML file.

        Uses the Ray cluster this process is connected to, else `ray_address`, else RAY_ADDRESS, else starts a local
        one, which ends with the pool.

        Raises:
            ConfigError: no such model, or a layout that cannot work.
            WeightsError: a checkpoint that lacks tensors or has others.
            WorkerStartError: no Ray at the address, resources that the cluster does not have, a worker that could not
                load, capture or answer its probe, or that did not within `start_timeout_s`.
        """
        started_s = time.monotonic()
        if not isinstance(config, PoolConfig):
            config = load_config(config)
        adapter = load_adapter(config.worker.encoder)  # fails in milliseconds for what no worker could load
        own = local_ray.connect(config)
        pool: EncoderPool | None = None
        try:
            worker_config = place(config)
            name = f"pool-{uuid.uuid4().hex[:8]}"
            router = (
                ray.remote(num_cpus=0, max_restarts=-1)(RouterActor)
                .options(name=f"{name}.router", namespace=NAMESPACE)
                .remote(
                    config.worker.encoder,
                    lease_timeout_s=config.lease_timeout_s,
                    silent_timeout_s=config.silent_timeout_s,
                )
            )
            actor_class = worker_actor_class(worker_config)
            workers: dict[str, Any] = {}
            transport = RayTransport(router, workers.__getitem__, timeout_s=ROUTER_TIMEOUT_S)
            client = Client(config, adapter, transport, num_workers=lambda: len(workers))
            pool = cls(config, router, workers, client, transport.gate)
            pool._ray = own
            for number in range(config.num_workers):
                worker_id = f"worker-{number}"
                workers[worker_id] = actor_class.options(
                    name=f"{name}.{worker_id}",
                    namespace=NAMESPACE,
                    num_cpus=config.cpus_per_worker,
                    num_gpus=1 if worker_config.device == "cuda" else 0,
                ).remote(worker_id, worker_config, f"{name}.router", NAMESPACE)
            pool._wait_ready(started_s + config.start_timeout_s)
        except BaseException:
            if pool is not None:
                pool.close()
            elif own is not None:
                own.shutdown()
            raise
        logger.info("%s ready: %d workers in %.1f s", name, config.num_workers, time.monotonic() - started_s)
        return pool

    def encode(self, source: Source, *, timeout_s: float | None = None) -> Embedding:
        """Encode one image, given as a path or as its bytes. Raises its typed error."""
        return self._client.encode(source, timeout_s=timeout_s)

    def encode_many(
        self, sources: Iterable[Source], *, timeout_s: float | None = None
    ) -> Generator[Outcome, None, None]:
        """Outcomes in the order of the sources, streamed with bounded memory. See `Client.encode_many`.

        Raises:
            TypeError: a single path or bytes object, whose pieces are no sources.
        """
        if isinstance(sources, str | bytes | bytearray | memoryview | Path):
            raise TypeError("encode_many takes many paths or bytes objects; encode takes a single one")
        return self._client.encode_many(sources, timeout_s=timeout_s)

    def members(self) -> list[Member]:
        """The workers as the router knows them. Raises WorkerLostError when it does not answer, PoolClosedError."""
        until_s = time.monotonic() + ROUTER_TIMEOUT_S
        while True:
            try:
                with self._gate:
                    members: list[Member] = ray.get(self._router.members.remote(), timeout=ROUTER_TIMEOUT_S)
                return members
            except (RayActorError, GetTimeoutError) as error:  # it restarts, or is stuck
                if time.monotonic() > until_s:
                    raise WorkerLostError(f"the router does not answer ({type(error).__name__})") from error
                time.sleep(POLL_S)

    def stats(self) -> PoolStats:
        """Counts of every worker that answers within two seconds. Raises as `members` does."""
        members = self.members()
        reports = []
        with self._gate:
            calls = [worker.report.remote() for worker in self._workers.values()]
            done, _ = ray.wait(calls, num_returns=len(calls), timeout=REPORT_TIMEOUT_S)
            for call in done:
                try:
                    reports.append(ray.get(call, timeout=REPORT_TIMEOUT_S))
                except RayError as error:
                    logger.info("a worker does not report: %s", type(error).__name__)
        return PoolStats(num_workers=len(self._workers), members=tuple(members), reports=tuple(reports))

    def close(self) -> None:
        """End every actor, and Ray itself with the last pool that needs it. Work under way raises PoolClosedError."""
        self._client.closed = True
        if not self._gate.close():
            return
        try:
            if ray.is_initialized():
                for actor in [*self._workers.values(), self._router]:
                    ray.kill(actor)
                self._gate.wait_empty(ROUTER_TIMEOUT_S)  # the calls of other threads end with their actors
        finally:
            if self._ray is not None:
                self._ray.shutdown()

    def __enter__(self) -> EncoderPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _wait_ready(self, until_s: float) -> None:
        pings = {worker.ping.remote(): worker_id for worker_id, worker in self._workers.items()}
        members: dict[str, Member] = {}
        while sum(member.state is WorkerState.READY for member in members.values()) < len(self._workers):
            if time.monotonic() > until_s:
                raise WorkerStartError(self._what_is_missing(set(pings.values()), members))
            done, _ = ray.wait(list(pings), timeout=POLL_S)
            for call in done:
                worker_id = pings.pop(call)
                try:
                    ray.get(call, timeout=ROUTER_TIMEOUT_S)
                except RayActorError as error:
                    raise WorkerStartError(f"{worker_id} could not start its process: {error}") from error
            try:
                members = {member.worker_id: member for member in self.members()}
            except WorkerLostError as error:
                if isinstance(error.__cause__, GetTimeoutError):  # it still loads
                    continue
                raise WorkerStartError(f"the router could not start: {error}") from error
            for member in members.values():
                if member.error is not None:
                    raise _start_error(member.worker_id, member.error)
            if not pings:
                time.sleep(POLL_S)
        check_gpus_differ(members.values())

    def _what_is_missing(self, unplaced: set[str], members: dict[str, Member]) -> str:
        free: dict[str, float] = ray.available_resources()
        loading = sorted(set(self._workers) - unplaced - set(members))
        parts = []
        if unplaced:
            parts.append(
                f"{', '.join(sorted(unplaced))} found no place (free: {free.get('GPU', 0):g} GPUs, "
                f"{free.get('CPU', 0):g} CPUs)"
            )
        if loading:
            parts.append(f"{', '.join(loading)} still loading")
        return (
            f"after {self.config.start_timeout_s:g} s {' and '.join(parts) or 'not all workers are ready'}; "
            f"free the resources, or raise start_timeout_s"
        )


def _start_error(worker_id: str, note: ErrorNote) -> EncoderPoolError:
    """What a worker says of its start: the user's mistakes keep their type."""
    error = note.to_error()
    kind = type(error) if isinstance(error, ConfigError | WeightsError) else WorkerStartError
    return kind(f"{worker_id} could not start: {note.name}: {note.message}")


def place(config: PoolConfig) -> WorkerConfig:
    """The workers' configuration with its `auto` values decided for this cluster.

    Raises WorkerStartError when the cluster could not hold them even if nobody else used it.
    """
    total: dict[str, float] = ray.cluster_resources()
    num_gpus, num_cpus = total.get("GPU", 0.0), total.get("CPU", 0.0)
    worker = config.worker
    device = worker.device
    if device == "auto":
        device = "cuda" if num_gpus else "cpu"
    if device == "cuda" and num_gpus < config.num_workers:
        raise WorkerStartError(
            f"{config.num_workers} workers need a GPU each, the cluster has {num_gpus:g}; "
            f"lower num_workers, or set worker.device: cpu"
        )
    if config.cpus_per_worker * config.num_workers > num_cpus:
        raise WorkerStartError(
            f"{config.num_workers} workers need {config.cpus_per_worker * config.num_workers:g} CPUs, the cluster has "
            f"{num_cpus:g}; lower num_workers or cpus_per_worker"
        )
    num_cores = max(1, int((num_cpus or os.cpu_count() or 1) // config.num_workers))  # one worker's share
    return worker.model_copy(
        update={
            "device": device,
            "torch_threads": worker.torch_threads or (num_cores if device == "cpu" else 1),
            "decode_threads": worker.decode_threads or min(16, max(2, num_cores)),
        }
    )


def check_gpus_differ(members: Iterable[Member]) -> None:
    """Raises WorkerStartError when two workers landed on one GPU."""
    owners: dict[str, str] = {}
    for member in members:
        if member.gpu_uuid is None:
            continue
        other = owners.setdefault(member.gpu_uuid, member.worker_id)
        if other != member.worker_id:
            raise WorkerStartError(f"{other} and {member.worker_id} share GPU {member.gpu_uuid}")
