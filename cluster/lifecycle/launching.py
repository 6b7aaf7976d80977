"""`RayCrew`: starts, watches and ends a pool's actors. The supervisor decides (supervisor.py).

Every worker has a placement group of its own, so that a worker taken away frees its place and no other's, and a
restarted process finds its place still reserved. The groups are named after their workers: what the pool has can be
read from the cluster, whoever started it.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayActorError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.config import PoolConfig
from cluster.groups import GroupConfig
from cluster.lifecycle.actors import NAMESPACE, ROUTER, actor_name, find_actor
from cluster.lifecycle.crew import Life, Sight
from cluster.lifecycle.nodes import NodeRoom, check_total, choose_node, demand_of, describe_demand, settle_groups
from cluster.lifecycle.places import place_name, places_of
from cluster.routing.roster import Member
from cluster.routing.router import RouterActor
from encoder.errors import PoolClosedError
from workers.actor import worker_actor_class

logger = logging.getLogger(__name__)

ROUTER_TIMEOUT_S = 2.0

# It warns that an actor dies with its placement group; that is what we want.
logging.getLogger("ray.actor").setLevel(logging.ERROR)


@dataclass(slots=True, kw_only=True)
class _Hand:
    """A worker's actor and the questions put to it."""

    handle: Any
    place: PlacementGroup | None
    node_id: str | None = None  # where it should rather go
    ping: Any = None
    asked_s: float = 0.0
    life: Life = Life.WAITING
    reason: str = ""
    drain: Any = None
    drained: bool = False
    ended: bool = False


class RayCrew:
    """The actors of one pool on Ray. One thread at a time."""

    def __init__(self, name: str, config: PoolConfig, *, detached: bool) -> None:
        """`detached`: the actors live on when this process ends."""
        self.name = name
        self._config = config
        self._lifetime = {"lifetime": "detached"} if detached else {}
        self._hands: dict[str, _Hand] = {}
        self._router: Any = None

    def settle(self) -> tuple[GroupConfig, ...]:
        """The groups with `auto` decided for this cluster. Raises WorkerStartError when it can't hold them."""
        total: dict[str, float] = ray.cluster_resources()
        groups = settle_groups(self._config.worker_groups, total)
        check_total(groups, total)
        return groups

    def start_router(self) -> Any:
        """Start the router, or find it."""
        self._router = (
            ray.remote(num_cpus=0, max_restarts=-1)(RouterActor)
            .options(name=actor_name(self.name, ROUTER), namespace=NAMESPACE, get_if_exists=True, **self._lifetime)
            .remote(
                list(self._config.encoders.values()),
                lease_timeout_s=self._config.lease_timeout_s,
                client_timeout_s=self._config.client_timeout_s,
                silent_timeout_s=self._config.silent_timeout_s,
            )
        )
        return self._router

    def adopt(self) -> list[str]:
        """Ids of the workers that are there, by their placement groups."""
        for place in places_of(self.name):
            try:
                handle = find_actor(self.name, place.worker_id)
            except ValueError:  # it died for good: `look` says so
                handle = None
            self._hands[place.worker_id] = _Hand(handle=handle, place=place.handle)
        return list(self._hands)

    # --- what a supervisor asks for ------------------------------------------------------------------------------

    def check(self, groups: Iterable[GroupConfig]) -> None:
        check_total(list(groups), ray.cluster_resources())

    def launch(self, worker_id: str, group: GroupConfig) -> None:
        demand = demand_of(group)
        node_id = choose_node(self._rooms(), demand, self._config.placement)
        place = placement_group(
            [demand],
            strategy="STRICT_PACK",  # the one that takes a hint
            name=place_name(self.name, worker_id),
            _soft_target_node_id=node_id,
            **self._lifetime,
        )
        handle = (
            worker_actor_class(group.worker)
            .options(
                name=actor_name(self.name, worker_id),
                namespace=NAMESPACE,
                num_cpus=demand.get("CPU", 0),
                num_gpus=demand.get("GPU", 0),
                resources=dict(group.resources),
                scheduling_strategy=PlacementGroupSchedulingStrategy(place, placement_group_bundle_index=0),
                **self._lifetime,
            )
            .remote(worker_id, group.worker, actor_name(self.name, ROUTER), NAMESPACE)
        )
        self._hands[worker_id] = _Hand(handle=handle, place=place, node_id=node_id)

    def look(self) -> Mapping[str, Sight]:
        if not ray.is_initialized():  # a call would start a Ray of its own
            raise PoolClosedError("this process's connection to Ray was shut down, and with it its workers")
        now_s = time.monotonic()
        for hand in self._hands.values():
            if hand.ping is None and hand.life is not Life.DEAD:
                if hand.handle is None:
                    hand.life, hand.reason = Life.DEAD, "its actor is gone"
                else:
                    hand.ping, hand.asked_s = hand.handle.ping.remote(), now_s
        asked = [hand.ping for hand in self._hands.values() if hand.ping is not None]
        done = set(ray.wait(asked, num_returns=len(asked), timeout=0)[0]) if asked else set()
        for hand in self._hands.values():
            if hand.ping in done:
                hand.life, hand.reason = _hear(hand.ping)
                hand.ping = None
        return {
            worker_id: Sight(
                life=hand.life, reason=hand.reason, silent_s=0.0 if hand.ping is None else now_s - hand.asked_s
            )
            for worker_id, hand in self._hands.items()
        }

    def members(self) -> list[Member] | None:
        members: list[Member] | None = self._ask_router("members")
        return members

    def num_refused(self) -> int | None:
        num_refused: int | None = self._ask_router("refused")
        return num_refused

    def _ask_router(self, what: str) -> Any:
        """None while it does not answer."""
        try:
            return ray.get(getattr(self._router, what).remote(), timeout=ROUTER_TIMEOUT_S)
        except (RayActorError, GetTimeoutError) as error:
            logger.info("the router does not answer: %s", type(error).__name__)
            return None

    def stop_leases(self, worker_id: str) -> None:
        self._router.drain.remote(worker_id)

    def suspect(self, incarnation: str) -> None:
        self._router.suspect.remote(incarnation)

    def drain(self, worker_id: str) -> bool:
        hand = self._hands[worker_id]
        if hand.drain is not None and ray.wait([hand.drain], timeout=0)[0]:
            try:
                hand.drained = hand.drained or bool(ray.get(hand.drain))
            except RayError as error:  # it died or restarts: it has nothing any more
                logger.info("%s does not drain: %s", worker_id, type(error).__name__)
                hand.drained = True
            hand.drain = None
        if hand.drain is None and not hand.drained:
            hand.drain = hand.handle.drain.remote(0.0)
        return hand.drained

    def end(self, worker_id: str) -> None:
        hand = self._hands[worker_id]
        if not hand.ended:
            hand.ended = True
            hand.handle.__ray_terminate__.remote()

    def restart(self, worker_id: str) -> None:
        hand = self._hands[worker_id]
        ray.kill(hand.handle, no_restart=False)
        hand.ping, hand.life = None, Life.AWAY

    def bury(self, worker_id: str) -> None:
        hand = self._hands.pop(worker_id)
        if hand.handle is not None:
            ray.kill(hand.handle)
        if hand.place is not None:
            remove_placement_group(hand.place)

    def forget(self, worker_id: str) -> None:
        self._router.forget.remote(worker_id)

    def why_waiting(self, worker_ids: Iterable[str]) -> str:
        places = {place.worker_id: place for place in places_of(self.name)}
        waiting: dict[str, Mapping[str, float]] = {}
        for worker_id in worker_ids:
            place = places.get(worker_id)
            if place is not None and not place.made:
                waiting[worker_id] = place.demand
        if not waiting:
            return ""
        asked = Counter(describe_demand(demand) for demand in waiting.values())
        total, free = ray.cluster_resources(), ray.available_resources()
        have = [
            f"{total.get(name, 0.0):g} {name} ({free.get(name, 0.0):g} free)"
            for name in dict.fromkeys(name for demand in waiting.values() for name in demand)
        ]
        return (
            f"{', '.join(sorted(waiting))} found no place: asked for "
            f"{' and '.join(f'{count} x ({what})' for what, count in asked.items())}, the cluster has {', '.join(have)}"
        )

    def close(self) -> None:
        """Kill every actor and free every place."""
        if not ray.is_initialized():  # somebody has ended it, and our actors with it
            return
        for worker_id in list(self._hands):
            self.bury(worker_id)
        if self._router is not None:
            ray.kill(self._router)

    # --- nodes ---------------------------------------------------------------------------------------------------

    def _rooms(self) -> list[NodeRoom]:
        """The nodes with what this pool has on them, or hopes to have."""
        rooms = {
            node["NodeID"]: NodeRoom(node_id=node["NodeID"], total=node["Resources"])
            for node in ray.nodes()
            if node["Alive"]
        }
        places = {place.worker_id: place for place in places_of(self.name)}
        for worker_id, hand in self._hands.items():
            place = places.get(worker_id)
            node_id = hand.node_id if place is None or not place.node_id else place.node_id
            if place is not None and node_id in rooms:
                room = rooms[node_id]
                taken = Counter(room.taken or {})
                taken.update(place.demand)
                rooms[node_id] = replace(room, num_workers=room.num_workers + 1, taken=taken)
        return list(rooms.values())


def _hear(ping: Any) -> tuple[Life, str]:
    try:
        ray.get(ping, timeout=ROUTER_TIMEOUT_S)
    except ActorUnavailableError:
        return Life.AWAY, ""
    except ActorDiedError as error:
        return Life.DEAD, str(error)
    except RayError as error:
        return Life.AWAY, str(error)
    return Life.UP, ""
