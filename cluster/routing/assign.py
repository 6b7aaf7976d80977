"""Which worker takes an item: a choice over plans of what the router knows of each worker. No Ray, no torch.

An item costs about the same on all workers that hold the same graphs for it and are as fast. `WorkerIndex`
(worker_index.py) keeps such groups, cheapest first, for each shape seen. `assign` compares a few of each group
(Mitzenmacher, "The power of two choices", 2001), so it takes as long for thousands of workers as for ten, and looks no
further than the first group while no other can finish sooner.

A lease names one worker: the second choice, another holder or eager elsewhere, is made when it is needed, by a call
that excludes the first. On two busy cores such a call takes 1 to 4 ms (medians), of the 0.3 s from a worker's death to
the first re-dispatch and of the 4 ms from a call that is refused to the next; a choice made beforehand would know
neither who died nor how queues stand by then, and would have to be counted in flight on both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable

from cluster.routing.leases import Refusal
from cluster.routing.plans import Plan, Seat

NO_WORKER_RETRY_MS = 200.0
NOBODY_IS_UP = Refusal(saturated=False, retry_ms=NO_WORKER_RETRY_MS, message="no worker is up that may take it")
HEAD_START = 0.95  # what counts of a cost on the worker drawn first: costs are measured, so equals differ a little

Item = tuple[Plan, int, Collection[str], int]
"""Where it may go, its encoded bytes, the incarnations that it must not go to (again), its digest or 0."""

Home = Callable[[Seat, Plan, Collection[str], int], Seat]
"""Changes the seat chosen for an item of this plan, with these exclusions and this digest, to one at its home."""


def assign(
    items: Iterable[Item], *, urgent: bool = False, home: Home | None = None
) -> tuple[list[Seat], dict[int, Refusal]]:
    """Choose the worker that would finish an item first, for each item of a call, and count it in flight there.

    Two of the cheapest group are drawn by lot. Work costs less where a graph matches than where it must run eagerly, so
    holders of the graph come first until their backlog outweighs that; then one of each dearer group is looked at too.
    An item is refused only if nobody has room for it. This is the router's inner loop, so it is written out in one.

    Args:
        urgent: whether they are interactive.
        home: may change a choice for content that a worker has in its cache.

    Returns:
        Each item's seat, and the refusals by the place of the item. A refused item's seat says nothing.
    """
    seats: list[Seat] = []
    refusals: dict[int, Refusal] = {}
    full: dict[Plan, Refusal] = {}  # in one call queues only grow: who got no room for a shape gets none again
    for plan, num_bytes, exclude, digest in items:
        best, second = next(plan.pairs)
        best_ms = best.worker.in_flight_ms + HEAD_START * best.cost_ms
        second_ms = second.worker.in_flight_ms + second.cost_ms
        if second_ms < best_ms:
            best, best_ms = second, second_ms
        if best_ms > plan.bar_ms:
            # Where the others are no better now, they hardly are before these are later by the price of going there.
            plan.bar_ms = best_ms + plan.others[0].floor_ms
            for group in plan.others:
                if group.floor_ms >= best_ms:
                    break
                other = next(group.lots)
                other_ms = other.worker.in_flight_ms + other.cost_ms
                if other_ms < best_ms:
                    best, best_ms = other, other_ms
                    plan.bar_ms = other_ms
        worker = best.worker
        is_full = (
            worker.in_flight_ms + best.cost_ms > worker.max_queue_ms
            or worker.in_flight_bytes + num_bytes > worker.max_queue_bytes
        ) and worker.in_flight_ms > 0
        if is_full or (exclude and worker.incarnation in exclude):
            known = None if exclude else full.get(plan)
            choice = known or scan(plan, exclude, num_bytes, urgent)
            if isinstance(choice, Refusal):
                refusals[len(seats)] = choice
                seats.append(best)
                if not exclude:
                    full[plan] = choice
                continue
            best, worker = choice, choice.worker
        if digest and home is not None:
            best = home(best, plan, exclude, digest)
            worker = best.worker
        worker.in_flight_ms += best.cost_ms
        worker.in_flight_bytes += num_bytes
        if urgent:
            worker.urgent_ms += best.cost_ms
            worker.urgent_bytes += num_bytes
        plan.num_leased += 1
        seats.append(best)
    return seats, refusals


def scan(plan: Plan, exclude: Collection[str], num_bytes: int, urgent: bool) -> Seat | Refusal:
    """The same choice among all workers, in time that grows with them; who has no room is left out."""
    num_up = 0
    room_in_ms = best_ms = math.inf
    best: Seat | None = None
    for group in plan.groups:
        for seat in group.seats():
            worker = seat.worker
            if worker.incarnation in exclude:
                continue
            num_up += 1
            wait_ms = worker.wait_ms(seat.cost_ms, num_bytes, urgent=urgent)
            seat_ms = worker.in_flight_ms + seat.cost_ms
            if wait_ms > 0:
                room_in_ms = min(room_in_ms, wait_ms)
            elif seat_ms < best_ms:
                best, best_ms = seat, seat_ms
    if best is not None:
        return best
    if not num_up:
        return NOBODY_IS_UP
    return Refusal(
        saturated=True,
        retry_ms=room_in_ms,
        message=f"all {num_up} workers are full; retry in {room_in_ms:.0f} ms",
    )
