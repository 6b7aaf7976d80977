"""Which worker takes an item: a pure choice over an index of what the router knows of each worker. No Ray, no torch.

An item costs about the same on all workers that hold the same graphs for it and are as fast. `WorkerIndex`
(worker_index.py) keeps such groups, cheapest first, for each shape seen. `assign` compares a few of each group
(Mitzenmacher, "The power of two choices", 2001), so it takes as long for thousands of workers as for ten, and looks no
further than the first group while no other can finish sooner.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

from cluster.routing.leases import Grant, Refusal
from encoder.types import Grid
from workers.admission import Load, wait_ms
from workers.costs import CostTable, Quote
from workers.messages import WorkerState

NO_WORKER_RETRY_MS = 200.0
NOTHING_MS = 1e-6  # less is a rounding error
TIE = 0.05  # of an item's cost: costs are measured, so equals differ a little
ROUNDS, SPAN = 4, 64  # how often pairs drawn by lot are used, and how many are drawn at once at least


@dataclass(slots=True, kw_only=True, eq=False)
class WorkerView:
    """A worker as the router sees it. Only the router changes it."""

    worker_id: str
    incarnation: str
    state: WorkerState
    costs: CostTable
    max_queue_ms: float
    model: str = ""
    max_queue_bytes: int = 2**62
    in_flight_ms: float = 0.0  # cost of the leases on it, as the router counts them
    in_flight_bytes: int = 0  # encoded
    urgent_ms: float = 0.0  # of these, interactive ones
    urgent_bytes: int = 0
    heard_s: float = 0.0  # when it last reported
    suspect_until_s: float = 0.0  # a client found it dead; reports do not clear that before

    def wait_ms(self, cost_ms: float, num_bytes: int = 0, *, urgent: bool = False) -> float:
        """0 when so much more fits, else after how much work it should: by the rule that workers admit by."""
        total = Load(self.in_flight_ms, self.in_flight_bytes)
        own = Load(self.urgent_ms, self.urgent_bytes)
        if not urgent:
            own = Load(total.ms - own.ms, total.num_bytes - own.num_bytes)
        limit = Load(self.max_queue_ms, self.max_queue_bytes)
        return wait_ms(Load(cost_ms, num_bytes), total=total, own=own, limit=limit)

    def has_room(self, cost_ms: float, num_bytes: int = 0, *, urgent: bool = False) -> bool:
        """Whether so much more work fits. An idle worker takes any item."""
        return self.wait_ms(cost_ms, num_bytes, urgent=urgent) <= 0

    def settle(self, cost_ms: float, num_bytes: int, *, urgent: bool) -> None:
        """So much less is in flight."""
        self.in_flight_ms -= cost_ms
        self.in_flight_bytes -= num_bytes
        if urgent:
            self.urgent_ms -= cost_ms
            self.urgent_bytes -= num_bytes
        # Rounding errors must not add up, or keep an idle worker "busy".
        if self.urgent_ms < NOTHING_MS:
            self.urgent_ms = 0.0
        if self.in_flight_ms - self.urgent_ms < NOTHING_MS:
            self.in_flight_ms = self.urgent_ms


class Seat:
    """An item's shape on one worker: what it costs there, and how a lease for it travels."""

    __slots__ = ("cost_ms", "grant", "incumbent_ms", "quote", "worker")

    def __init__(self, worker: WorkerView, quote: Quote) -> None:
        self.worker = worker
        self.quote = quote
        self.cost_ms = quote.cost_ms
        self.incumbent_ms = (1 - TIE) * quote.cost_ms  # its cost when it was drawn first: others have to beat that
        graph = None if quote.key is None else str(quote.key)
        self.grant: Grant = (worker.worker_id, worker.incarnation, graph, quote.cost_ms)


class Group:
    """Workers on which a shape costs about the same. Each is looked up and priced when it is first drawn."""

    __slots__ = ("_find", "_grids", "_seats", "_workers", "floor_ms", "pairs")

    def __init__(
        self, grids: tuple[Grid, ...], find: Callable[[], list[WorkerView]], floor_ms: float, rng: random.Random
    ) -> None:
        """`find` gives its workers, at least one; it is called once, if at all."""
        self._grids = grids
        self._find = find
        self._workers: list[WorkerView] = []
        self._seats: list[Seat | None] = []
        self.floor_ms = floor_ms  # the least cost known
        self.pairs = chain.from_iterable(self._rounds(rng))

    def _load(self) -> int:
        if not self._workers:
            self._workers = self._find()
            self._seats = [None] * len(self._workers)
        return len(self._workers)

    def seats(self) -> Iterator[Seat]:
        """Every worker once."""
        return map(self._seat, range(self._load()))

    def _seat(self, index: int) -> Seat:
        seat = self._seats[index]
        if seat is None:
            worker = self._workers[index]
            seat = self._seats[index] = Seat(worker, worker.costs.quote(self._grids))
            self.floor_ms = min(self.floor_ms, seat.cost_ms)
        return seat

    def _rounds(self, rng: random.Random) -> Iterator[Iterable[tuple[Seat, Seat]]]:
        """Two different workers by lot, without end; one worker alone is a pair with itself.

        A round goes through all of them, in an order that changes now and then, and puts each beside the one that
        stands some way behind it, each time another way. So nobody is passed over by bad luck, and a pair costs no
        random number of its own.
        """
        size = self._load()
        yield self._first_round(size, rng)
        seats = list(self.seats())
        num_turns = max(1, SPAN // size)
        while True:
            rng.shuffle(seats)
            for _ in range(ROUNDS):
                behind: list[Seat] = []
                for _ in range(num_turns):
                    shift = 1 + int(rng.random() * (size - 1))
                    behind += seats[shift:]
                    behind += seats[:shift]
                for _ in range(ROUNDS):
                    yield zip(seats * num_turns, behind, strict=True)

    def _first_round(self, size: int, rng: random.Random) -> Iterator[tuple[Seat, Seat]]:
        """In steps of equal length around the circle, which takes no time to prepare: who is never drawn costs none."""
        place, step = rng.randrange(size), rng.randrange(size)
        while math.gcd(step, size) != 1:
            step = rng.randrange(size)
        for _ in range(size):
            before, place = place, (place + step) % size
            yield self._seat(place), self._seat(before)


class Plan:
    """Where items of one shape may go: groups, cheapest first."""

    __slots__ = ("at_home", "groups", "num_leased", "num_tokens", "others", "pairs")

    def __init__(self, groups: list[Group]) -> None:
        self.groups = groups
        self.at_home: dict[WorkerView, Seat] = {}  # on workers that have such an item in their cache
        self.num_leased = 0  # items that got a lease since `WorkerIndex.take_counts`
        self.num_tokens = 0  # of such an item, once somebody asked
        self.pairs = groups[0].pairs if groups else None  # of the cheapest
        self.others = groups[1:]


Choice = tuple[Seat, "Seat | None"]
"""The worker for an item, and who would be next."""


def assign(plan: Plan, exclude: Collection[str] = (), num_bytes: int = 0, urgent: bool = False) -> Choice | Refusal:
    """Choose the worker that would finish an item first, of two in a group drawn by lot, and who would be next.

    Work costs less where a graph matches than where it must run eagerly, so holders of the graph come first until
    their backlog outweighs that; then the work goes elsewhere. An item is refused only if nobody has room for it.

    Args:
        plan: where items of its shape may go.
        exclude: incarnations that this item must not go to (again).
        num_bytes: what it brings, encoded.
        urgent: whether it is interactive.
    """
    if plan.pairs is None:
        return scan(plan, exclude, num_bytes, urgent)
    best, second = next(plan.pairs)
    best_ms = best.worker.in_flight_ms + best.incumbent_ms
    second_ms = second.worker.in_flight_ms + second.cost_ms
    if second_ms < best_ms:
        best, second, best_ms = second, best, second_ms
    for group in plan.others:
        if group.floor_ms >= best_ms and second is not best:
            break
        seat = next(group.pairs)[0]
        seat_ms = seat.worker.in_flight_ms + seat.cost_ms
        if seat_ms < best_ms:
            best, second, best_ms = seat, best, seat_ms
        elif second is best:
            second = seat
    worker = best.worker
    if (
        worker.in_flight_ms + best.cost_ms > worker.max_queue_ms
        or worker.in_flight_bytes + num_bytes > worker.max_queue_bytes
    ) and worker.in_flight_ms > 0:
        return scan(plan, exclude, num_bytes, urgent)
    if exclude and (worker.incarnation in exclude or second.worker.incarnation in exclude):
        return scan(plan, exclude, num_bytes, urgent)
    return best, second if second is not best else None


def scan(plan: Plan, exclude: Collection[str] = (), num_bytes: int = 0, urgent: bool = False) -> Choice | Refusal:
    """The same choice among all workers, in time that grows with them."""
    num_up = 0
    room_in_ms = math.inf
    best: list[tuple[float, Seat]] = []
    for group in plan.groups:
        for seat in group.seats():
            worker = seat.worker
            if worker.incarnation in exclude:
                continue
            num_up += 1
            wait_ms = worker.wait_ms(seat.cost_ms, num_bytes, urgent=urgent)
            if wait_ms <= 0:
                best.append((worker.in_flight_ms + seat.cost_ms, seat))
            else:
                room_in_ms = min(room_in_ms, wait_ms)
    if best:
        first = min(best, key=lambda entry: entry[0])
        others = [entry for entry in best if entry is not first]
        return first[1], min(others, key=lambda entry: entry[0])[1] if others else None
    if not num_up:
        return Refusal(saturated=False, retry_ms=NO_WORKER_RETRY_MS, message="no worker is up that may take it")
    return Refusal(
        saturated=True,
        retry_ms=room_in_ms,
        message=f"all {num_up} workers are full; retry in {room_in_ms:.0f} ms",
    )
