"""`GroupConfig`: workers of a pool that are alike, where they run, and between how many they may grow and shrink."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field, ValidationInfo, field_validator, model_validator

from workers.config import WorkerConfig

SHARED = ("worker", "cpus_per_worker", "gpu_share", "resources", "autoscale")
"""Keys of a group that the pool's top level may say for all of them."""

MAX_WORKERS = 4096  # of a pool or group: routing is measured up to here, and plans for more take for ever
LEAST_AMOUNT = 1e-4  # Ray counts resources in ten-thousandths
RESERVED = {"CPU": "cpus_per_worker", "GPU": "gpu_share", "memory": None, "object_store_memory": None}


def _countable(amount: float) -> float:
    if 0 < amount < LEAST_AMOUNT:
        raise ValueError(f"must be 0, or {LEAST_AMOUNT:g} at least: Ray counts no finer")
    return amount


def _custom(resources: dict[str, float]) -> dict[str, float]:
    for name in resources.keys() & RESERVED.keys():
        key = RESERVED[name]
        raise ValueError(f"{name!r} is no custom resource of a cluster; {f'say {key}' if key else 'leave it out'}")
    return resources


Amount = Annotated[float, Field(ge=0), AfterValidator(_countable)]
"""Of a resource, as Ray reserves it. Each use says the most: a bound here would replace it."""

Resources = Annotated[dict[str, Annotated[Amount, Field(le=1e9)]], AfterValidator(_custom)]
"""Custom resources of a Ray cluster by name."""


class AutoscaleConfig(BaseModel, frozen=True, extra="forbid"):
    """How many workers a group may have, and how long work may queue before it gets more."""

    min_workers: int = Field(ge=1, le=MAX_WORKERS)
    max_workers: int = Field(ge=1, le=MAX_WORKERS)

    target_queue_ms: float = Field(default=500.0, gt=0)
    """Predicted milliseconds of work in flight on each worker that are aimed at."""

    up_after_s: float = Field(default=5.0, ge=0, le=86_400)
    """How long there must be more than that, or work refused, before workers are added."""

    down_after_s: float = Field(default=120.0, ge=0, le=86_400)
    """How long fewer workers must have sufficed before one is taken away; also the pause after any change."""

    @model_validator(mode="after")
    def _in_order(self) -> AutoscaleConfig:
        if self.min_workers > self.max_workers:
            raise ValueError(f"min_workers must not be above max_workers, which is {self.max_workers}")
        return self


class GroupConfig(BaseModel, frozen=True, extra="forbid"):
    """Workers that are alike. What a group leaves out, the pool's top level says for all groups.

    A group's `worker` section is laid over the pool's, key by key, and so is its `encoder` section; each group ends
    up with a whole `WorkerConfig` of its own:

        worker: {encoder: {model: random-minicpmv-2.6}}
        groups:
          - {name: gpu, num_workers: 2, worker: {device: cuda}}
          - {name: cpu, num_workers: 1, worker: {device: cpu, encoder: {dtype: float32}}, cpus_per_worker: 8}
    """

    name: str = Field(default="worker", pattern=r"^[a-z][a-z0-9_]*$", max_length=40)
    """Its workers are called `NAME-0`, `NAME-1`..."""

    num_workers: int = Field(ge=0, le=MAX_WORKERS)
    worker: WorkerConfig

    cpus_per_worker: Amount = Field(default=1.0, le=4096)
    """CPU cores that Ray reserves for each worker."""

    gpu_share: Amount = Field(default=1.0, gt=0, le=1)
    """Part of a GPU that each worker on one gets; below 1 several share it."""

    resources: Resources = {}
    """Ray's custom resources that each worker needs, such as `{"fast_disk": 1}`, to choose its nodes by."""

    autoscale: AutoscaleConfig | None = None
    """None: the number of workers changes only when somebody asks."""

    @field_validator("autoscale")
    @classmethod
    def _starts_in_range(cls, limits: AutoscaleConfig | None, others: ValidationInfo) -> AutoscaleConfig | None:
        return starts_within(limits, others.data.get("num_workers"))


def starts_within(limits: AutoscaleConfig | None, num_workers: int | None) -> AutoscaleConfig | None:
    """The limits, if that many workers are within them. Raises ValueError."""
    if limits is None or num_workers is None or limits.min_workers <= num_workers <= limits.max_workers:
        return limits
    raise ValueError(f"num_workers must be {limits.min_workers} to {limits.max_workers}, it is {num_workers}")


def inherit(data: Mapping[str, Any]) -> dict[str, Any]:
    """A pool's configuration with what its top level says filled into its groups, and their number of workers added."""
    filled = dict(data)
    groups = filled.get("groups")
    if not isinstance(groups, list | tuple) or not groups:
        return filled
    plain = [group for group in map(_as_map, groups) if isinstance(group, Mapping)]
    if len(plain) < len(groups):
        return filled  # pydantic says what is wrong
    numbers = [group.get("num_workers") for group in plain]
    if "num_workers" not in filled and all(isinstance(number, int) for number in numbers):
        filled["num_workers"] = sum(number for number in numbers if isinstance(number, int))
    filled["groups"] = [_filled(group, filled) for group in plain]
    # Only now: what one group says is no other group's default.
    own, first = _as_map(filled.get("worker", {})), _as_map(plain[0].get("worker"))
    if isinstance(own, Mapping) and isinstance(first, Mapping) and "encoder" in first:
        filled["worker"] = {"encoder": first["encoder"], **own} if own else first
    return filled


def _filled(group: Mapping[str, Any], pool: Mapping[str, Any]) -> dict[str, Any]:
    shared = {key: pool[key] for key in SHARED if key in pool}
    both = {**shared, **group}
    own, common = _as_map(group.get("worker")), _as_map(pool.get("worker"))
    if isinstance(own, Mapping) and isinstance(common, Mapping):
        both["worker"] = {**common, **own}
        own, common = _as_map(own.get("encoder")), _as_map(common.get("encoder"))
        if isinstance(own, Mapping) and isinstance(common, Mapping):
            both["worker"]["encoder"] = {**common, **own}
    return both


def _as_map(value: object) -> object:
    return value.model_dump(exclude_unset=True) if isinstance(value, BaseModel) else value
