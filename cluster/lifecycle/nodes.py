"""What workers need of the cluster and which node they should go to. Pure arithmetic; no Ray, no torch."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from cluster.groups import GroupConfig
from encoder.errors import WorkerStartError

Resources = Mapping[str, float]
"""Amounts by Ray's names: CPU, GPU, and custom ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRoom:
    """A node and what is on it of ours."""

    node_id: str
    total: Resources
    num_workers: int = 0
    taken: Resources | None = None  # by those workers

    def holds(self, demand: Resources) -> bool:
        """Whether so much fits beside our own; others' work is not known here."""
        taken = self.taken or {}
        return all(self.total.get(name, 0.0) - taken.get(name, 0.0) >= need for name, need in demand.items())


def settle_groups(groups: Iterable[GroupConfig], total: Resources) -> tuple[GroupConfig, ...]:
    """The groups with their `auto` values decided for a cluster with so much in total."""
    groups = tuple(groups)
    num_gpus, num_cpus = total.get("GPU", 0.0), total.get("CPU", 0.0)
    num_workers = max(1, sum(group.num_workers for group in groups))
    num_cores = max(1, int((num_cpus or os.cpu_count() or 1) // num_workers))  # one worker's share
    settled = []
    for group in groups:
        worker = group.worker
        device = worker.device
        if device == "auto":
            device = "cuda" if num_gpus else "cpu"
        own_cores = max(num_cores, int(group.cpus_per_worker))
        update = {
            "device": device,
            "torch_threads": worker.torch_threads or (own_cores if device == "cpu" else 1),
            "decode_threads": worker.decode_threads or min(16, max(2, own_cores)),
            "gpu_memory_share": min(worker.gpu_memory_share, group.gpu_share),
        }
        settled.append(group.model_copy(update={"worker": worker.model_copy(update=update)}))
    return tuple(settled)


def demand_of(group: GroupConfig) -> dict[str, float]:
    """What Ray reserves for one worker of a settled group. Never nothing: a reservation needs something to reserve."""
    demand = {"CPU": group.cpus_per_worker, **group.resources}
    if group.worker.device == "cuda":
        demand["GPU"] = group.gpu_share
    return {name: need for name, need in demand.items() if need > 0} or {"memory": 1.0}


def cpus_for(groups: Iterable[GroupConfig]) -> int:
    """CPUs of a cluster of one's own on this machine: all cores, or what the workers may come to reserve.

    More workers than cores share them.
    """
    most = sum(
        group.cpus_per_worker * (group.autoscale.max_workers if group.autoscale else group.num_workers)
        for group in groups
    )
    return max(os.cpu_count() or 1, math.ceil(most))


def check_total(groups: Sequence[GroupConfig], total: Resources) -> None:
    """Raises WorkerStartError when a cluster could not hold the workers even if nobody else used it."""
    num_workers = sum(group.num_workers for group in groups)
    needs: Counter[str] = Counter()
    for group in groups:
        for name, need in demand_of(group).items():
            needs[name] += need * group.num_workers  # type: ignore[assignment]  # Counter adds fractions as well
    for name, need in needs.items():
        if need <= total.get(name, 0.0) + 1e-6 or name == "memory":
            continue
        have = f"the cluster has {total.get(name, 0.0):g}"
        if name == "GPU":
            on_gpus = [group for group in groups if group.worker.device == "cuda"]
            count = sum(group.num_workers for group in on_gpus)
            what = "a GPU each" if all(group.gpu_share == 1 for group in on_gpus) else f"{need:g} GPUs together"
            raise WorkerStartError(f"{count} workers need {what}, {have}; lower num_workers, or set worker.device: cpu")
        hint = "cpus_per_worker" if name == "CPU" else "resources"
        what = f"{need:g} CPUs" if name == "CPU" else f"{need:g} of {name!r}"
        raise WorkerStartError(f"{num_workers} workers need {what}, {have}; lower num_workers or {hint}")


def choose_node(rooms: Iterable[NodeRoom], demand: Resources, placement: Literal["spread", "pack"]) -> str | None:
    """The node that a worker should rather go to; None when it fits nowhere.

    spread: the one with the fewest of our workers; pack: with the most.
    """
    fitting = [room for room in rooms if room.holds(demand)]
    if not fitting:
        return None
    sign = 1 if placement == "spread" else -1
    return min(fitting, key=lambda room: (sign * room.num_workers, room.node_id)).node_id


def describe_demand(demand: Resources) -> str:
    """`1 GPU + 2 CPU`, for messages."""
    return " + ".join(f"{need:g} {name}" for name, need in sorted(demand.items(), key=lambda pair: pair[0] != "GPU"))


def crowded_gpus(gpus: Mapping[str, tuple[str, float]]) -> list[tuple[str, str, str]]:
    """GPUs on which workers hold more than one whole share.

    Args:
        gpus: the UUID of each worker's GPU and the share of it that is the worker's, in the order they came.

    Returns:
        (GPU, the worker that came too much, another one there), one a crowded GPU.
    """
    owners: dict[str, list[str]] = {}
    shares: Counter[str] = Counter()
    crowded = []
    for worker_id, (uuid, share) in gpus.items():
        owners.setdefault(uuid, []).append(worker_id)
        before, shares[uuid] = shares[uuid], shares[uuid] + share  # type: ignore[assignment]
        if before <= 1 + 1e-6 < shares[uuid]:
            crowded.append((uuid, worker_id, owners[uuid][0]))
    return crowded
