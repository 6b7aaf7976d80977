"""`RayFleet`: how a replanner reaches the router and the workers of a pool on Ray."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from cluster.config import PoolConfig
from cluster.groups import GroupConfig
from cluster.lifecycle.actors import WorkerHandles
from cluster.planning.histogram import TrafficHistogram
from cluster.planning.replanner import Replanner
from cluster.planning.replanning import Replanning
from encoder.adapters.registry import load_adapter
from encoder.types import GraphKey
from workers.messages import TracedItem, WorkerReport

logger = logging.getLogger(__name__)

TIMEOUT_S = 2.0


class RayFleet:
    """Actor calls; every wait has a limit. One thread at a time."""

    def __init__(self, pool: str, router: Any, model: str = "") -> None:
        """`model`: whose workers and traffic, in a pool of several; the first one's when left out."""
        self._router, self._model = router, model
        self._workers = WorkerHandles(pool)

    def reports(self) -> Sequence[WorkerReport] | None:
        """See `Fleet.reports`."""
        try:
            worker_ids: list[str] = ray.get(self._router.worker_ids.remote(self._model), timeout=TIMEOUT_S)
            self._workers.keep(worker_ids)
            calls = [self._workers.handle(worker_id).report.remote() for worker_id in worker_ids]
            reports: list[WorkerReport] = ray.get(calls, timeout=TIMEOUT_S)
        except (RayError, ValueError) as error:
            logger.info("not all workers report: %s", type(error).__name__)
            return None
        return reports

    def report(self, worker_id: str) -> WorkerReport | None:
        """See `Fleet.report`."""
        try:
            report: WorkerReport = ray.get(self._workers.handle(worker_id).report.remote(), timeout=TIMEOUT_S)
        except (RayError, ValueError) as error:
            logger.info("%s does not report: %s", worker_id, type(error).__name__)
            self._workers.drop(worker_id)
            return None
        return report

    def traffic(self) -> TrafficHistogram | None:
        """See `Fleet.traffic`."""
        try:
            traffic: bytes = ray.get(self._router.traffic.remote(self._model), timeout=TIMEOUT_S)
        except (RayActorError, GetTimeoutError) as error:
            logger.info("the router does not answer: %s", type(error).__name__)
            return None
        return TrafficHistogram.from_bytes(traffic)

    def take_trace(self, recorder: str) -> tuple[TracedItem, ...]:
        """Items of all models that ended since this recorder asked before; none while the router does not answer."""
        try:
            items: tuple[TracedItem, ...] = ray.get(self._router.take_trace.remote(recorder), timeout=TIMEOUT_S)
        except (RayActorError, GetTimeoutError) as error:
            logger.warning("the router does not answer, items may be missing: %s", type(error).__name__)
            return ()
        return items

    def apply(self, worker_id: str, keys: tuple[GraphKey, ...]) -> None:
        """See `Fleet.apply`."""
        self._workers.handle(worker_id).apply_graphs.remote(keys)


def replanning(config: PoolConfig, groups: Sequence[GroupConfig], pool: str, router: Any) -> Replanning:
    """What lets a pool's graphs follow its traffic; empty where they should not.

    `groups` are the configuration's, settled for this cluster.
    """
    replanners = []
    for model, encoder in config.encoders.items():
        alike = [group for group in groups if group.worker.encoder.model == model]
        wanted = config.replan.enabled
        if wanted == "auto":
            wanted = any(group.worker.device == "cuda" for group in alike)
        if wanted and encoder.graphs:
            shares = {
                group.name: group.gpu_share
                for group in alike
                # A limit of its own is each worker's already.
                if group.worker.device == "cuda" and group.worker.graph_memory_gib is None
            }
            fleet = RayFleet(pool, router, model)
            replanners.append(Replanner(fleet, load_adapter(encoder), encoder, config.replan, memory_shares=shares))
    return Replanning(replanners)
