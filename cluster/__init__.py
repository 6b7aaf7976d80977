"""Many workers, one front door. `from cluster import EncoderPool` loads Ray; `import cluster` does not."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cluster.config import PoolConfig as PoolConfig
    from cluster.config import load_config as load_config
    from cluster.lifecycle.stats import PoolStats as PoolStats
    from cluster.pool import EncoderPool as EncoderPool
    from cluster.streams.outcomes import Embedding as Embedding
    from cluster.streams.outcomes import Outcome as Outcome
    from cluster.vllm import to_vllm as to_vllm

_HOMES = {
    "EncoderPool": "cluster.pool",
    "PoolStats": "cluster.lifecycle.stats",
    "Embedding": "cluster.streams.outcomes",
    "Outcome": "cluster.streams.outcomes",
    "PoolConfig": "cluster.config",
    "load_config": "cluster.config",
    "to_vllm": "cluster.vllm",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'cluster' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
