"""What workers need of a cluster, and where they go."""

from __future__ import annotations

import os

import pytest
from fakes import tiny_config

from cluster.config import PoolConfig
from cluster.groups import GroupConfig
from cluster.lifecycle.nodes import (
    NodeRoom,
    check_total,
    choose_node,
    cpus_for,
    crowded_gpus,
    demand_of,
    settle_groups,
)
from encoder.errors import WorkerStartError

CLUSTER = {"CPU": 16.0, "GPU": 4.0, "disk": 1.0}


def groups(*changes: dict[str, object]) -> tuple[GroupConfig, ...]:
    common = {"worker": {"encoder": {"model": "tiny-minicpmv-2.6"}}}
    each = [{"name": f"g{number}", "num_workers": 2, **change} for number, change in enumerate(changes)]
    return settle_groups(PoolConfig.model_validate({**common, "groups": each}).worker_groups, CLUSTER)


def test_a_worker_asks_for_its_cores_its_gpu_and_what_else_its_group_names() -> None:
    gpu, cpu, shared = groups(
        {"resources": {"disk": 0.5}}, {"worker": {"device": "cpu"}, "cpus_per_worker": 3}, {"gpu_share": 0.25}
    )
    assert demand_of(gpu) == {"CPU": 1.0, "GPU": 1.0, "disk": 0.5}
    assert demand_of(cpu) == {"CPU": 3.0}
    assert demand_of(shared)["GPU"] == 0.25
    assert [group.worker.device for group in (gpu, cpu, shared)] == ["cuda", "cpu", "cuda"]


def test_a_worker_that_needs_nothing_still_reserves_something() -> None:
    (group,) = groups({"worker": {"device": "cpu"}, "cpus_per_worker": 0})
    assert demand_of(group)


def test_cpu_workers_share_the_cores_and_gpu_workers_leave_them_to_decoding() -> None:
    cpu, gpu = groups({"worker": {"device": "cpu"}}, {})
    assert (cpu.worker.torch_threads, gpu.worker.torch_threads) == (4, 1)
    assert cpu.worker.decode_threads == gpu.worker.decode_threads == 4


def test_a_cluster_of_ones_own_has_cores_for_what_each_group_may_come_to_reserve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    limits = {"min_workers": 1, "max_workers": 3}
    assert cpus_for(groups({"cpus_per_worker": 0.25})) == 4
    assert cpus_for(groups({"cpus_per_worker": 8}, {"cpus_per_worker": 1.5, "autoscale": limits})) == 21


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_workers": 5}, "5 workers need a GPU each, the cluster has 4"),
        ({"num_workers": 9, "gpu_share": 0.5}, "9 workers need 4.5 GPUs together, the cluster has 4"),
        ({"num_workers": 2, "cpus_per_worker": 9}, "2 workers need 18 CPUs, the cluster has 16"),
        ({"num_workers": 3, "resources": {"disk": 0.5}}, "3 workers need 1.5 of 'disk', the cluster has 1"),
    ],
)
def test_what_the_cluster_lacks_is_named(change: dict[str, object], said: str) -> None:
    with pytest.raises(WorkerStartError, match=said):
        check_total(groups(change), CLUSTER)


def test_what_fits_passes() -> None:
    check_total(groups({}, {"gpu_share": 0.5}, {"worker": {"device": "cpu"}}), CLUSTER)
    check_total(tiny_config().worker_groups, {"CPU": 1.0})


def test_spread_goes_where_the_fewest_are_and_pack_where_the_most_are_among_nodes_with_room() -> None:
    rooms = [
        NodeRoom(node_id="a", total={"GPU": 4.0}, num_workers=2, taken={"GPU": 2.0}),
        NodeRoom(node_id="b", total={"GPU": 4.0}, num_workers=1, taken={"GPU": 1.0}),
        NodeRoom(node_id="full", total={"GPU": 3.0}, num_workers=3, taken={"GPU": 3.0}),
        NodeRoom(node_id="bare", total={"CPU": 8.0}),
    ]
    assert choose_node(rooms, {"GPU": 1.0}, "spread") == "b"
    assert choose_node(rooms, {"GPU": 1.0}, "pack") == "a"
    assert choose_node(rooms, {"GPU": 4.0}, "pack") is None


def test_workers_on_one_gpu_must_share_it_on_purpose() -> None:
    whole = {"w-0": ("A", 1.0), "w-1": ("B", 1.0), "w-2": ("A", 1.0)}
    assert crowded_gpus(whole) == [("A", "w-2", "w-0")]
    shares = {"w-0": ("A", 0.5), "w-1": ("A", 0.5), "w-2": ("B", 1.0)}
    assert crowded_gpus(shares) == []
    assert crowded_gpus({**shares, "w-3": ("A", 0.5)}) == [("A", "w-3", "w-0")]
