"""`ReplanConfig`: when a running pool changes its graphs."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field


class ReplanConfig(BaseModel, frozen=True, extra="forbid"):
    """When a running pool changes its graphs; see `cluster.planning.replanner`."""

    enabled: bool | Literal["auto"] = "auto"
    """auto: where workers have GPUs. On CPUs graphs exist to be exercised; changing them gains little."""

    interval_s: float = Field(default=300.0, gt=0, le=1e6)
    """Time between two looks, and after a change until the next."""

    min_gain: float = Field(default=0.05, ge=0, lt=1)
    """Predicted share of the GPU time that a change must save."""

    horizon_s: float = Field(default=1800.0, gt=0, le=1e6)
    """How long traffic is trusted to stay as it is: what is saved in that time must exceed what captures take."""

    min_items: float = Field(default=200.0, ge=0)
    """Items seen lately (of the last quarter of an hour about) below which nothing is changed."""

    memory_gib: float | None = Field(default=None, gt=0)
    """For graphs on each worker. None: what `worker.graph_memory_gib` allows."""

    change_timeout_s: float = Field(default=300.0, gt=0, le=1e6)
    """Time for one worker to change its graphs."""
