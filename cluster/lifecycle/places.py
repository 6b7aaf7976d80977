"""The places that a pool has reserved in its cluster: one placement group a worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table

from cluster.lifecycle.actors import NAMESPACE, actor_name


@dataclass(frozen=True, kw_only=True)
class Place:
    """A placement group of ours that has not been removed."""

    worker_id: str  # whose it is
    handle: PlacementGroup
    made: bool  # the resources are ours
    node_id: str  # empty while it has none
    demand: Mapping[str, float]


def place_name(pool: str, worker_id: str) -> str:
    """Name of a worker's placement group. Theirs have no namespaces: others in the cluster may have pools, too."""
    return f"{NAMESPACE}.{actor_name(pool, worker_id)}"


def places_of(pool: str) -> list[Place]:
    """The placement groups of a pool's workers."""
    prefix = place_name(pool, "")
    places = []
    for group_id, about in placement_group_table().items():
        if about["name"].startswith(prefix) and about["state"] != "REMOVED":
            places.append(
                Place(
                    worker_id=about["name"].removeprefix(prefix),
                    handle=PlacementGroup(ray.PlacementGroupID.from_hex(group_id)),
                    made=about["state"] == "CREATED",
                    node_id=about["bundles_to_node_id"].get(0, ""),
                    demand=about["bundles"][0],
                )
            )
    return places
