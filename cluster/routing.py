"""Which worker takes an item: a pure function over what the router knows of each worker. No Ray, no torch."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from encoder.types import GraphKey, Grid
from workers.costs import CostTable, Quote
from workers.messages import WorkerState

NO_WORKER_RETRY_MS = 200.0
TIE = 1.05  # costs are measured, so equals differ a little


@dataclass(slots=True, kw_only=True)
class WorkerView:
    """A worker as the router sees it. Only the router changes it."""

    worker_id: str
    incarnation: str
    state: WorkerState
    costs: CostTable
    max_queue_ms: float
    in_flight_ms: float = 0.0  # cost of the leases on it, as the router counts them
    heard_s: float = 0.0  # when it last reported
    suspect_until_s: float = 0.0  # a client found it dead; reports do not clear that before

    def has_room(self, cost_ms: float) -> bool:
        """Whether so much more work fits. An idle worker takes an item of any cost."""
        return self.in_flight_ms <= 0 or self.in_flight_ms + cost_ms <= self.max_queue_ms


@dataclass(frozen=True, slots=True)
class Choice:
    """The worker for an item, its cost there, and who would be next."""

    worker: WorkerView
    quote: Quote
    second: WorkerView | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Nobody takes the item now."""

    saturated: bool  # False: no worker is up that may take it
    retry_ms: float  # when to come back
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Permission to send an item to a worker. Ends when the worker reports it settled, dies, or time is up."""

    lease_id: int
    worker_id: str
    incarnation: str
    key: GraphKey | None  # graph that takes most of it; None: eagerly
    cost_ms: float


def assign(
    grids: tuple[Grid, ...],
    workers: Iterable[WorkerView],
    rng: random.Random,
    exclude: Collection[str] = (),
) -> Choice | Refusal:
    """Choose the worker that would finish an item first.

    Work costs less where a graph matches than where it must run eagerly, so holders of the graph come first until
    their backlog outweighs that; then the work goes elsewhere. Equals are drawn by lot.

    Args:
        grids: the item's segments.
        workers: those that may get leases.
        exclude: incarnations that this item must not go to (again).
    """
    num_up = 0
    room_in_ms = float("inf")
    best: list[tuple[float, bool, WorkerView, Quote]] = []
    for worker in workers:
        if worker.incarnation in exclude:
            continue
        num_up += 1
        quote = worker.costs.quote(grids)
        if worker.has_room(quote.cost_ms):
            best.append((worker.in_flight_ms + quote.cost_ms, not quote.held, worker, quote))
        else:
            room_in_ms = min(room_in_ms, worker.in_flight_ms + quote.cost_ms - worker.max_queue_ms)
    if not num_up:
        return Refusal(saturated=False, retry_ms=NO_WORKER_RETRY_MS, message="no worker is up that may take it")
    if not best:
        return Refusal(
            saturated=True,
            retry_ms=room_in_ms,
            message=f"all {num_up} workers are full; retry in {room_in_ms:.0f} ms",
        )
    finish_ms, eager, _, _ = min(best, key=lambda entry: entry[:2])
    equals = [entry for entry in best if entry[0] <= finish_ms * TIE and entry[1] == eager]
    chosen = equals[0] if len(equals) == 1 else rng.choice(equals)
    others = [entry for entry in best if entry is not chosen]
    second = min(others, key=lambda entry: entry[:2], default=None)
    return Choice(chosen[2], chosen[3], None if second is None else second[2])
