"""`Ledger`: who leased what, and what that puts on each worker. Leases end once: settled, given back, out of time, or
with the client that holds them.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat

from cluster.routing.assign import NOBODY_IS_UP, Home, assign
from cluster.routing.leases import Answer, Ask, Grant, Refusal
from cluster.routing.plans import Plan, Seat
from cluster.routing.shares import Account, Shares
from cluster.routing.worker_view import WorkerView
from workers.priority import Priority

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
        # With the item's bytes, whether it is interactive, and whose it is.
        self._leases: dict[int, tuple[Seat, int, bool, Account]] = {}
        self._batches: deque[Batch] = deque()  # in order: every lease lives equally long
        self._next_id = first_id
        self._heard_s: dict[str, float] = {}  # by client
        self._gone_s: dict[str, float] = {}  # when they were given up
        self.num_asked = 0  # items, each time they asked
        self.num_refused = 0  # items for which no worker had room, each time they asked
        self._next_look_s = 0.0  # when clients are looked at again

    def lease(self, ask: Ask, plans: Sequence[Plan], shares: Shares, home: Home | None = None) -> Answer:
        """A lease or a refusal for each item.

        Args:
            plans: where items of each of its shapes may go; none when no worker is up.
            shares: of who asks for this model with this priority.
            home: may change the choice for content that a worker has in its cache.
        """
        num_items = len(ask.which)
        assert len(ask.sizes) == num_items
        first = self._next_id + 1
        self._next_id += num_items
        self.num_asked += num_items
        if ask.client:
            self.hear(ask.client)
        if not plans:
            return Answer(first, [NOBODY_IS_UP] * num_items)
        self._batches.append(Batch(self._now_s() + self._lease_timeout_s, first, self._next_id, ask.client))
        urgent = ask.priority is Priority.INTERACTIVE
        account = shares.account(ask.client)
        room_ms = shares.room_ms(account)
        which = ask.which if room_ms == math.inf else _within(room_ms, ask.which, plans)
        exclusions = [ask.excluded.get(index, ()) for index in range(num_items)] if ask.excluded else repeat(())
        items = zip(map(plans.__getitem__, which), ask.sizes, exclusions, ask.digests or repeat(0), strict=False)
        seats, refusals = assign(items, urgent=urgent, home=home)
        entries: list[Grant | Refusal] = [seat.grant for seat in seats]
        self._leases.update(enumerate(zip(seats, ask.sizes, repeat(urgent), repeat(account), strict=False), first))
        account.held_ms += sum(seat.cost_ms for seat in seats)
        for index, refusal in refusals.items():
            entries[index] = refusal
            account.settle(seats[index].cost_ms)
            del self._leases[first + index]
            self.num_refused += refusal.saturated
        num_later = num_items - len(which)
        if any(refusal.saturated and index not in ask.excluded for index, refusal in refusals.items()):
            shares.refused(account)
        elif not refusals and not num_later:
            account.hungry_until_s = -math.inf
        if num_later:  # the next one fits once as much of its own has ended
            next_ms = plans[ask.which[len(which)]].groups[0].floor_ms
            retry_ms = max(next_ms, next_ms - room_ms)
            why = f"others wait for room, and this client has its part of it; retry in {retry_ms:.0f} ms"
            entries += [Refusal(saturated=True, retry_ms=retry_ms, message=why)] * num_later
            self.num_refused += num_later
        return Answer(first, entries)

    def end(self, lease_ids: Iterable[int]) -> None:
        """These are over. Those that were over already make no difference."""
        for lease_id in lease_ids:
            lease = self._leases.pop(lease_id, None)
            if lease is not None:
                seat, size, urgent, account = lease
                seat.worker.settle(seat.cost_ms, size, urgent=urgent)
                account.settle(seat.cost_ms)

    def drop(self, worker: WorkerView | None) -> None:
        """The leases on a worker that is gone are over."""
        if worker is not None and worker.in_flight_ms > 0:  # each of its callers says that it is dead: look once
            self.end([lease_id for lease_id, (seat, *_) in self._leases.items() if seat.worker is worker])

    def counts(self) -> Counter[WorkerView]:
        """Leases on each worker."""
        return Counter(seat.worker for seat, *_ in self._leases.values())

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


def _within(room_ms: float, which: Sequence[int], plans: Sequence[Plan]) -> Sequence[int]:
    """The first items, as far as there is room for them; an item of any size where there is some."""
    for num_taken, index in enumerate(which):
        if room_ms <= 0:
            return which[:num_taken]
        room_ms -= plans[index].groups[0].floor_ms
    return which
