"""`Ledger`: who leased what, and what that puts on each worker. Leases end once: settled, given back, out of time, or
with the client that holds them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from cluster.routing.assign import Plan, Seat, WorkerView, assign
from cluster.routing.leases import Answer, Ask, Grant, Refusal
from encoder.types import Grid
from workers.priority import Priority

Home = Callable[[Seat, int, Plan, tuple[Grid, ...], Collection[str]], Seat]
"""The seat for content of this digest, from the seat chosen without regard to content, and its exclusions."""

REMEMBERED_S = 600.0  # how long workers may ask about a client that is gone


@dataclass(slots=True)
class Batch:
    """The leases of one call."""

    until_s: float
    first: int
    last: int
    client: str


class Ledger:
    """Leases in force. One thread at a time."""

    def __init__(
        self, *, lease_timeout_s: float, client_timeout_s: float, first_id: int, now_s: Callable[[], float]
    ) -> None:
        self._lease_timeout_s = lease_timeout_s
        self._client_timeout_s = client_timeout_s
        self._now_s = now_s
        self._leases: dict[int, tuple[Seat, int, bool]] = {}  # with the item's bytes, and whether it is interactive
        self._batches: deque[Batch] = deque()  # in order: every lease lives equally long
        self._next_id = first_id
        self._heard_s: dict[str, float] = {}  # by client
        self._gone_s: dict[str, float] = {}  # when they were given up
        self.num_asked = 0  # items, each time they asked
        self.num_refused = 0  # items for which no worker had room, each time they asked
        self._next_look_s = 0.0  # when clients are looked at again

    def lease(self, ask: Ask, plan: Callable[[tuple[Grid, ...]], Plan], home: Home | None = None) -> Answer:
        """A lease or a refusal for each item.

        Args:
            plan: says where items of a shape may go.
            home: may change the choice for content that a worker has in its cache.
        """
        plans = [plan(grids) for grids in ask.shapes]
        leases, excluded = self._leases, ask.excluded
        digests = ask.digests if home is not None else ()
        urgent = ask.priority is Priority.INTERACTIVE
        first = self._next_id + 1
        self._next_id += len(ask.which)
        self.num_asked += len(ask.which)
        now_s = self._now_s()
        if ask.client:
            self.hear(ask.client)
        self._batches.append(Batch(now_s + self._lease_timeout_s, first, self._next_id, ask.client))
        entries: list[Grant | Refusal] = []
        refused: dict[int, Refusal] = {}  # in one call queues only grow: who got no room for a shape gets none again
        for number, num_items in Counter(ask.which).items():
            plans[number].num_leased += num_items
        for lease_id, (number, size) in enumerate(zip(ask.which, ask.sizes, strict=True), first):
            exclude = excluded.get(lease_id - first, ()) if excluded else ()
            if refused and number in refused and not exclude:
                self.num_refused += refused[number].saturated
                plans[number].num_leased -= 1
                entries.append(refused[number])
                continue
            choice = assign(plans[number], exclude, size, urgent)
            if isinstance(choice, Refusal):
                self.num_refused += choice.saturated
                plans[number].num_leased -= 1
                entries.append(choice)
                if not exclude:
                    refused[number] = choice
                continue
            seat = choice[0]
            if home is not None and digests:
                seat = home(seat, digests[lease_id - first], plans[number], ask.shapes[number], exclude)
            worker = seat.worker
            worker.in_flight_ms += seat.cost_ms
            worker.in_flight_bytes += size
            if urgent:
                worker.urgent_ms += seat.cost_ms
                worker.urgent_bytes += size
            leases[lease_id] = (seat, size, urgent)
            entries.append(seat.grant)
        return Answer(first, entries)

    def end(self, lease_ids: Iterable[int]) -> None:
        """These are over. Those that were over already make no difference."""
        for lease_id in lease_ids:
            lease = self._leases.pop(lease_id, None)
            if lease is not None:
                seat, size, urgent = lease
                seat.worker.settle(seat.cost_ms, size, urgent=urgent)

    def counts(self) -> Counter[WorkerView]:
        """Leases on each worker."""
        return Counter(seat.worker for seat, _, _ in self._leases.values())

    def expire(self) -> None:
        """End the leases whose time is up, or whose client has been silent for too long."""
        now_s = self._now_s()
        while self._batches and self._batches[0].until_s <= now_s:
            batch = self._batches.popleft()
            self.end(range(batch.first, batch.last + 1))
        if now_s < self._next_look_s:
            return
        self._next_look_s = now_s + self._client_timeout_s / 10
        gone = {client for client, heard_s in self._heard_s.items() if heard_s + self._client_timeout_s <= now_s}
        for client in gone:
            del self._heard_s[client]
            self._gone_s[client] = now_s
        for batch in self._batches if gone else ():
            if batch.client in gone:
                self.end(range(batch.first, batch.last + 1))
        self._gone_s = {client: gone_s for client, gone_s in self._gone_s.items() if now_s - gone_s < REMEMBERED_S}

    def hear(self, client: str) -> None:
        """A client lives."""
        self._heard_s[client] = self._now_s()
        self._gone_s.pop(client, None)

    def silent(self, clients: Sequence[str]) -> list[str]:
        """Those of these clients that have been silent for too long. One that is new here has its time from now."""
        self.expire()
        silent = [client for client in clients if client in self._gone_s]
        for client in clients:
            if client not in self._gone_s:
                self._heard_s.setdefault(client, self._now_s())
        return silent
