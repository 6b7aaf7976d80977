"""The actors of a pool by name: how a process that did not start them finds the router and the workers."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from typing import Any

import ray
import ray.util

NAMESPACE = "encpool"
ROUTER, SUPERVISOR = "router", "supervisor"


def actor_name(pool: str, part: str) -> str:
    """Name of a pool's actor in our namespace; `part` is a worker id, or one of the names above."""
    return f"{pool}.{part}"


def find_actor(pool: str, part: str) -> Any:
    """Handle of a pool's actor. Raises ValueError when there is none."""
    return ray.get_actor(actor_name(pool, part), namespace=NAMESPACE)


def parts_of(pool: str) -> list[str]:
    """The parts of a pool whose actors are there: worker ids, router, supervisor, gateways."""
    prefix = actor_name(pool, "")
    return [name.removeprefix(prefix) for name in _names() if name.startswith(prefix)]


def pools_here() -> list[str]:
    """Names of the pools that live on in this cluster without a program of their own."""
    suffix = actor_name("", SUPERVISOR)
    return sorted(name.removesuffix(suffix) for name in _names() if name.endswith(suffix))


def _names() -> list[str]:
    named = ray.util.list_named_actors(all_namespaces=True)
    return [entry["name"] for entry in named if entry["namespace"] == NAMESPACE]


class WorkerHandles:
    """Handles of workers, looked up when one is named for the first time.

    Any thread may ask. Its dict changes in one step each, without a lock: a look-up may take long.
    """

    def __init__(self, pool: str) -> None:
        self._pool = pool
        self._handles: dict[str, Any] = {}

    def __len__(self) -> int:
        return len(self._handles)

    def handles(self) -> list[Any]:
        """Those known."""
        return list(self._handles.values())

    def handle(self, worker_id: str) -> Any:
        """Raises ValueError for a worker that is not there."""
        handle = self._handles.get(worker_id)
        if handle is None:
            handle = self._handles[worker_id] = find_actor(self._pool, worker_id)
        return handle

    def drop(self, worker_id: str) -> None:
        """Look it up again the next time: its actor is gone."""
        self._handles.pop(worker_id, None)

    def keep(self, worker_ids: Collection[str]) -> None:
        """Know these workers and no others; those that cannot be found yet are left out."""
        for worker_id in set(self._handles) - set(worker_ids):
            self.drop(worker_id)
        for worker_id in worker_ids:
            with suppress(ValueError):
                self.handle(worker_id)
