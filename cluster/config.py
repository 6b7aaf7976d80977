"""`PoolConfig`, and reading it from YAML with errors that help."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, Field, ValidationError, ValidationInfo, field_validator
from pydantic_core import ErrorDetails

from encoder.errors import ConfigError
from workers.config import WorkerConfig

MAX_S = 1e6  # threads cannot wait for ever longer: some eleven days are as good


class PoolConfig(BaseModel, frozen=True, extra="forbid"):
    """A pool: its workers, how long to wait for what, and how much a client keeps in flight."""

    num_workers: int = Field(ge=1, le=4096)
    worker: WorkerConfig

    ray_address: str | None = None
    """Address of a running Ray cluster. None: the one we are connected to, or RAY_ADDRESS, or a local one."""

    cpus_per_worker: float = Field(default=1.0, ge=0, le=4096)
    """CPU cores that Ray reserves for each worker."""

    start_timeout_s: float = Field(default=300.0, gt=0, le=MAX_S)
    """Time for all workers to load, capture and answer their probe."""

    items_per_call: int = Field(default=16, ge=1, le=1024)
    """Items that travel to a worker in one call."""

    calls_per_worker: int = Field(default=2, ge=1, le=64)
    """Calls that one stream keeps in flight on each worker."""

    max_in_flight_items: int = Field(default=256, ge=1)
    """Items a stream has read and not yet handed out, results that wait for an earlier one included."""

    max_in_flight_bytes: int = Field(default=256 * 2**20, ge=1)
    """Encoded bytes a stream holds for items without a result. One item always fits."""

    lease_timeout_s: float = Field(default=60.0, gt=0, le=MAX_S)
    """A lease whose worker reports nothing for this long no longer counts as work in flight."""

    call_timeout_s: float = Field(default=120.0, gt=0, le=MAX_S)
    """A worker that has not answered a call for this long counts as dead for it."""

    saturated_timeout_s: float = Field(default=30.0, ge=0, le=MAX_S)
    """How long a client comes back to a full pool before the item fails with PoolSaturatedError."""

    recovery_timeout_s: float = Field(default=60.0, ge=0, le=MAX_S)
    """How long a client waits for a restart when no worker is left; then items fail with WorkerLostError."""

    silent_timeout_s: float = Field(default=15.0, gt=0, le=MAX_S, validate_default=True)
    """A worker whose reports stop for this long gets no leases until it is heard again."""

    trace_file: Path | None = None
    """Where clients of the pool note each item and what became of it, for `encpool plan`. None: nowhere."""

    poison_after: int = Field(default=2, ge=1)
    """Dying workers an item may have been on before it is tried no more."""

    @field_validator("silent_timeout_s")
    @classmethod
    def _reports_come_in_time(cls, silent_timeout_s: float, others: ValidationInfo) -> float:
        worker: WorkerConfig | None = others.data.get("worker")
        if worker is not None and silent_timeout_s <= worker.report_interval_s:
            raise ValueError(
                f"must be above worker.report_interval_s, which is {worker.report_interval_s:g}, "
                f"or every idle worker counts as dead"
            )
        return silent_timeout_s


def load_config(path: str | Path) -> PoolConfig:
    """Read a pool's configuration. Raises ConfigError that names the file, the key and what fits."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path.name}: not YAML: {_one_line(error)}") from error
    return parse_config(data, source=path.name)


def parse_config(data: object, *, source: str) -> PoolConfig:
    """Check a configuration of plain maps and lists; `source` begins the message of the ConfigError."""
    if not isinstance(data, Mapping):
        raise ConfigError(f"{source}: a configuration is a map of keys such as 'num_workers: 2', got {_kind(data)}")
    try:
        return PoolConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError("\n".join(f"{source}: {_explain(detail)}" for detail in error.errors())) from error


def _explain(detail: ErrorDetails) -> str:
    where = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        *parents, key = detail["loc"]
        known = list(_model_at(parents).model_fields)
        close = difflib.get_close_matches(str(key), known, n=1)
        if close:
            return f"unknown key '{where}', did you mean '{'.'.join([*map(str, parents), close[0]])}'?"
        return f"unknown key '{where}', known here: {', '.join(known)}"
    if detail["type"] == "missing":
        return f"key '{where}' is missing"
    text = detail["msg"].removeprefix("Value error, ")
    message = text[0].lower() + text[1:]
    return f"{where}: {message}, got {detail['input']!r}"


def _model_at(loc: list[int | str]) -> type[BaseModel]:
    """The model that the keys `loc` lead to, from the root."""
    model: type[BaseModel] = PoolConfig
    for part in loc:
        annotation = model.model_fields[str(part)].annotation
        kinds = [annotation, *get_args(annotation)]
        model = next(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel))
    return model


def _one_line(error: yaml.YAMLError) -> str:
    return " ".join(str(error).split())


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"
