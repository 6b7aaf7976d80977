"""`PoolConfig`, and reading it from YAML."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ByteSize, Field, ValidationError, ValidationInfo, field_validator, model_validator

from cluster.config_errors import explain
from cluster.gateway.config import GatewayConfig
from cluster.groups import MAX_WORKERS, SHARED, Amount, AutoscaleConfig, GroupConfig, Resources, inherit, starts_within
from cluster.planning.replan_config import ReplanConfig
from cluster.yaml_file import read_yaml
from encoder.config import EncoderConfig
from encoder.errors import ConfigError, kind_of
from workers.config import WorkerConfig

MIN_WINDOW = 256  # items
MAY_DIFFER = {
    "dtype", "precision", "graphs", "layouts", "token_budgets", "traffic", "max_segments_per_graph", "attention",
    "eager_patches",
}  # fmt: skip
"""What workers with the same model may have apart: how they compute, not what."""

MAX_S = 1e6  # threads cannot wait for ever longer: some eleven days are as good


class PoolConfig(BaseModel, frozen=True, extra="forbid"):
    """A pool: its workers, how long to wait for what, and how much a client keeps in flight.

    Either `num_workers` equal workers, or `groups` of them; `worker_groups` are the groups in both cases, each with a
    whole `worker` section. `worker` is what the groups have in common (the first group's when left out).
    """

    num_workers: int = Field(ge=1, le=MAX_WORKERS)
    """At the start, of all groups together; left out, it is their sum."""

    worker: WorkerConfig

    groups: tuple[GroupConfig, ...] = ()
    """Workers of several kinds. See `GroupConfig`."""

    name: str = Field(default="default", pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$", max_length=60)
    """What `encpool up` calls it, and other commands and `EncoderPool.connect` ask for."""

    ray_address: str | None = None
    """Address of a running Ray cluster. None: the one we are connected to, or RAY_ADDRESS, or a local one."""

    cpus_per_worker: Amount = Field(default=1.0, le=4096)
    """CPU cores that Ray reserves for each worker."""

    gpu_share: Amount = Field(default=1.0, gt=0, le=1)
    """Part of a GPU that each worker on one gets; below 1 several share it."""

    resources: Resources = {}
    """Ray's custom resources that each worker needs, such as `{"fast_disk": 1}`, to choose its nodes by."""

    autoscale: AutoscaleConfig | None = None
    """None: the number of workers changes only when somebody asks."""

    placement: Literal["spread", "pack"] = "spread"
    """Put workers on as many nodes as there are, or on as few as hold them."""

    replan: ReplanConfig = ReplanConfig()
    """When workers change their graphs to suit the traffic."""

    start_timeout_s: float = Field(default=300.0, gt=0, le=MAX_S)
    """Time for all workers to find their place, load, capture and answer their probe."""

    drain_timeout_s: float = Field(default=60.0, gt=0, le=MAX_S)
    """Time for a worker that is taken away to finish what it has; then what is left goes to others."""

    stuck_timeout_s: float = Field(default=60.0, gt=0, le=MAX_S)
    """A worker whose process has not answered for this long is killed, and started again."""

    items_per_call: int = Field(default=16, ge=1, le=1024)
    """Items that travel to a worker in one call."""

    calls_per_worker: int = Field(default=8, ge=1, le=64)
    """Calls that one stream keeps in flight on each worker. A call ends with its slowest item, so four are too few to
    keep a GPU busy: measured 91 % of the time with photos of all sizes."""

    max_in_flight_items: int | None = Field(default=None, ge=1)
    """Items a stream has read and not yet handed out, results that wait for an earlier one included. None: half as
    many again as its calls to all workers carry, 256 at least."""

    max_in_flight_bytes: ByteSize = Field(default=ByteSize(256 * 2**20), ge=1)
    """Encoded bytes a stream holds for items without a result. One item always fits."""

    max_shared_bytes: ByteSize = Field(default=ByteSize(4 * 2**30), ge=0)
    """Memory that a client shares at most with workers on its own machine, for what it sends and what they answer: up
    to 256 MiB a call under way, and as little as it takes. Other calls go through Ray's object store, which takes
    1 to 3 ms longer for one image. 0: all do."""

    lease_timeout_s: float = Field(default=60.0, gt=0, le=MAX_S)
    """A lease whose worker reports nothing for this long no longer counts as work in flight."""

    call_timeout_s: float = Field(default=120.0, gt=0, le=MAX_S)
    """A worker that has answered neither a call nor one that came before it for this long counts as dead for it."""

    saturated_timeout_s: float = Field(default=30.0, ge=0, le=MAX_S)
    """How long a client comes back to a full pool before the item fails with PoolSaturatedError."""

    recovery_timeout_s: float = Field(default=60.0, ge=0, le=MAX_S)
    """How long a client waits for a restart when no worker is left; then items fail with WorkerLostError."""

    silent_timeout_s: float = Field(default=15.0, gt=0, le=MAX_S, validate_default=True)
    """A worker whose reports stop for this long gets no leases until it is heard again."""

    gateway: GatewayConfig = GatewayConfig()
    """The HTTP front door, where there is one."""

    trace_file: Path | None = None
    """Where programs that encode through the pool, not its gateways, note each item and what became of it, for
    `encpool plan`; `encpool trace` records what any of them encode. None: nowhere."""

    client_timeout_s: float = Field(default=10.0, ge=0.5, le=MAX_S)
    """A client not heard of for this long is gone: its leases end, and workers drop what they hold of it."""

    quarantine_s: float = Field(default=3600.0, gt=0, le=MAX_S)
    """How long content that workers died of is refused."""

    poison_after: int = Field(default=2, ge=1)
    """Workers that may die with an item on board, the last one when it was alone in its call, before it is tried no
    more. Where workers die for other reasons at the same time, it may be up to two more."""

    @property
    def caches(self) -> bool:
        """Whether some worker has an embedding cache."""
        return any(group.worker.cache_bytes for group in self.worker_groups)

    def window(self, num_workers: int) -> int:
        """Items that a stream may have read and not yet handed out."""
        if self.max_in_flight_items is not None:
            return self.max_in_flight_items
        return max(MIN_WINDOW, num_workers * self.calls_per_worker * self.items_per_call * 3 // 2)

    @property
    def encoders(self) -> dict[str, EncoderConfig]:
        """One for each model that the groups name, in their order. Where groups share a model, the first one's."""
        encoders: dict[str, EncoderConfig] = {}
        for group in self.worker_groups:
            encoders.setdefault(group.worker.encoder.model, group.worker.encoder)
        return encoders

    @property
    def worker_groups(self) -> tuple[GroupConfig, ...]:
        """The groups; without any, the one that the top level describes."""
        if self.groups:
            return self.groups
        shared: dict[str, Any] = {key: getattr(self, key) for key in SHARED}
        return (GroupConfig(num_workers=self.num_workers, **shared),)

    @model_validator(mode="before")
    @classmethod
    def _groups_inherit(cls, data: object) -> object:
        return inherit(data) if isinstance(data, Mapping) else data

    @field_validator("groups")
    @classmethod
    def _groups_differ(cls, groups: tuple[GroupConfig, ...], others: ValidationInfo) -> tuple[GroupConfig, ...]:
        names = [group.name for group in groups]
        if len(set(names)) < len(names):
            raise ValueError(f"each needs a name of its own, these are {', '.join(names)}")
        num_workers, total = others.data.get("num_workers"), sum(group.num_workers for group in groups)
        if groups and num_workers is not None and num_workers != total:
            raise ValueError(f"they have {total} workers together, num_workers says {num_workers}; leave that out")
        return groups

    @field_validator("groups")
    @classmethod
    def _groups_of_a_model_agree(cls, groups: tuple[GroupConfig, ...]) -> tuple[GroupConfig, ...]:
        first: dict[str, GroupConfig] = {}
        for group in groups:
            encoder = group.worker.encoder
            other = first.setdefault(encoder.model, group)
            for key in sorted(EncoderConfig.model_fields.keys() - MAY_DIFFER):
                if getattr(encoder, key) != getattr(other.worker.encoder, key):
                    raise ValueError(
                        f"{other.name} and {group.name} have the same model and must agree on worker.encoder.{key}, "
                        f"or its results would depend on the worker"
                    )
        return groups

    @field_validator("autoscale")
    @classmethod
    def _starts_in_range(cls, limits: AutoscaleConfig | None, others: ValidationInfo) -> AutoscaleConfig | None:
        alone = not others.data.get("groups")
        return starts_within(limits, others.data.get("num_workers") if alone else None)

    @field_validator("silent_timeout_s")
    @classmethod
    def _reports_come_in_time(cls, silent_timeout_s: float, others: ValidationInfo) -> float:
        workers: list[WorkerConfig] = [group.worker for group in others.data.get("groups", ())]
        if "worker" in others.data:
            workers.append(others.data["worker"])
        for worker in workers:
            if silent_timeout_s <= worker.report_interval_s:
                raise ValueError(
                    f"must be above worker.report_interval_s, which is {worker.report_interval_s:g}, "
                    f"or every idle worker counts as dead"
                )
        return silent_timeout_s


def load_config(path: str | Path) -> PoolConfig:
    """Read a pool's configuration. Raises ConfigError that names the file, the key and what fits."""
    return parse_config(read_yaml(path), source=Path(path).name)


def parse_config(data: object, *, source: str) -> PoolConfig:
    """Check a configuration of plain maps and lists; `source` begins the message of the ConfigError."""
    if not isinstance(data, Mapping):
        raise ConfigError(f"{source}: a configuration is a map of keys such as 'num_workers: 2', got {kind_of(data)}")
    try:
        return PoolConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError("\n".join(f"{source}: {explain(detail, PoolConfig)}" for detail in error.errors())) from error
