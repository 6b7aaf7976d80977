"""`Plan`: where items of one shape may go, as groups of workers on which they cost about the same. No Ray, no torch."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, repeat
from sys import intern

from cluster.routing.leases import Grant
from cluster.routing.worker_view import WorkerView
from encoder.types import Grid
from workers.costs import Quote

ROUNDS, SPAN = 4, 64  # how often an order drawn by lot is used, and how many are drawn at once at least


class Seat:
    """An item's shape on one worker: what it costs there, and how a lease for it travels."""

    __slots__ = ("cost_ms", "grant", "worker")

    def __init__(self, worker: WorkerView, quote: Quote, part: float = 1.0) -> None:
        """`part` of the quoted cost counts."""
        self.worker = worker
        self.cost_ms = part * quote.cost_ms
        graph = None if quote.key is None else intern(str(quote.key))  # pickle writes it once for all its workers
        self.grant: Grant = (worker.worker_id, worker.incarnation, graph, self.cost_ms)


class Group:
    """Workers on which a shape costs about the same. Each is looked up when it is first drawn.

    `lots` draws one of them after the other, `pairs` two different ones; one worker alone is a pair with itself. Both
    go through all of them, in an order that changes now and then: nobody is passed over by bad luck, and a draw takes
    no random number of its own.
    """

    __slots__ = ("_find", "_price", "_seats", "_slots", "floor_ms", "lots", "pairs")

    def __init__(
        self, find: Callable[[], Sequence[int]], price: Callable[[int], Seat], floor_ms: float, rng: random.Random
    ) -> None:
        """`find` gives the slots of its workers, at least one; it is called once, if at all. `price` gives the seat on
        one of them."""
        self._find, self._price = find, price
        self._slots: Sequence[int] = ()
        self._seats: list[Seat | None] = []
        self.floor_ms = floor_ms  # the least cost known
        self.lots = chain.from_iterable(self._lots(rng))
        self.pairs = chain.from_iterable(self._pairs(rng))

    def _load(self) -> int:
        if not self._seats:
            self._slots = self._find()
            self._seats = [None] * len(self._slots)
        return len(self._seats)

    def seats(self) -> Iterator[Seat]:
        """Every worker once."""
        return map(self._seat, range(self._load()))

    def _seat(self, index: int) -> Seat:
        seat = self._seats[index]
        if seat is None:
            seat = self._seats[index] = self._price(self._slots[index])
            if seat.cost_ms < self.floor_ms:
                self.floor_ms = seat.cost_ms
        return seat

    def _lots(self, rng: random.Random) -> Iterator[Iterable[Seat]]:
        """Rounds through all workers, without end."""
        size = self._load()
        yield (seat for seat, _ in self._first_round(size, rng))
        seats = list(self.seats())
        while True:
            rng.shuffle(seats)
            yield from repeat(seats * max(1, SPAN // size), ROUNDS * ROUNDS)

    def _pairs(self, rng: random.Random) -> Iterator[Iterable[tuple[Seat, Seat]]]:
        """Rounds that put each worker beside the one that stands some way behind it, now and then another way."""
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

    __slots__ = ("at_home", "bar_ms", "grids", "groups", "num_leased", "num_tokens", "others", "pairs")

    def __init__(self, grids: tuple[Grid, ...], groups: list[Group]) -> None:
        """`groups`: at least one."""
        self.grids = grids
        self.groups = groups
        self.pairs = groups[0].pairs
        self.others = groups[1:]
        self.at_home: dict[WorkerView, Seat] = {}  # on workers that have such an item in their cache
        self.num_leased = 0  # items that got a lease since `WorkerIndex.take_counts`
        self.num_tokens = 0  # of such an item, once somebody asked
        self.begin_call()

    def begin_call(self) -> None:
        """Queues may be shorter than they were at the last call."""
        self.bar_ms = self.others[0].floor_ms if self.others else math.inf
        """An item that the first group ends no later than this is not offered to the others."""
