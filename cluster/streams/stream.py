"""Items under way: lease, send, collect, retry elsewhere. Who adds them and hears of their ends is another's matter.

Everything happens in one thread, a step at a time: ordered.py steps for `encode_many`, the gateway for its requests.
An item is open from the moment it is added until it ends; each step moves it one place further:

    waiting -> (lease) -> leased -> (call) -> in a call -> done
       ^--------- refused, or its worker died --------'

`Leasing` (leasing.py) holds what waits and what is leased, `Calls` (calls.py) what is on its way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from cluster.streams.calls import Calls
from cluster.streams.items import Item, OpenItems
from cluster.streams.leasing import MAX_RETRY_S, Leasing
from cluster.streams.session import Session
from workers.priority import Priority

LONGEST_WAIT_S = 1.0


class Stream:
    """Open items of one owner. All methods but `__init__` belong to one thread."""

    def __init__(self, session: Session, *, sleep: Callable[[float], None] = time.sleep) -> None:
        """`sleep` passes the time while there is nothing but refusals to wait out."""
        self._session = session
        self._config = session.config
        self._sleep = sleep
        self._items = OpenItems(session.meter)
        self._leasing = Leasing(session, self._items)
        self._calls = Calls(session, self._items, self._leasing)
        self._session.presence.begin()
        self._is_closed = False

    @property
    def open_bytes(self) -> int:
        """Encoded bytes of open items."""
        return self._items.num_bytes

    def add(self, item: Item) -> None:
        """Open an item."""
        self._items.open(item)
        self._leasing.add(item)

    def step(self, *, more: bool, wait: bool) -> None:
        """Move every item as far as it gets.

        Args:
            more: other items come at once, so a call that is not full may wait for them.
            wait: if nothing ends in this step, wait until something may have changed, LONGEST_WAIT_S at most.
        """
        self._session.export()
        num_ended = self._items.num_ended
        self._leasing.ask(self._free_slots(), is_idle=not len(self._calls), more=more)
        self._calls.send()
        wait_s = self._idle_s() if wait and self._items.num_ended == num_ended else 0.0
        if len(self._calls):
            self._calls.collect(wait_s)
        elif wait_s:
            self._sleep(wait_s)

    def excuse(self, paused_s: float) -> None:
        """The owner did something else for so long: nobody was asked meanwhile, so nobody refused."""
        if paused_s > MAX_RETRY_S:
            self._items.progress_s = time.monotonic()

    def cancel(self, items: Sequence[Item]) -> None:
        """Nobody awaits these items any more: what of them has not begun is dropped, and they end no more."""
        dropped = {item for item in items if item.is_open}
        for item in dropped:
            self._items.drop(item)
        self._leasing.cancel(dropped)
        self._calls.cancel(dropped)

    def close(self) -> None:
        """Leave nothing behind: queued work is dropped at the workers, unused leases return."""
        if not self._is_closed:
            self._is_closed = True
            self._session.presence.end()
        if not self._session.closed:
            self._calls.clear()
            self._leasing.clear()

    def _free_slots(self) -> dict[Priority, int]:
        """Calls that may be started: of each priority as many again, or batch calls would block interactive ones."""
        num_slots = self._config.calls_per_worker * max(1, self._session.num_workers())
        return {priority: num_slots - self._calls.count(priority) for priority in Priority}

    def _idle_s(self) -> float:
        """How long there is nothing to do but wait for a call."""
        now_s = time.monotonic()
        wake_s = now_s + LONGEST_WAIT_S
        free = [priority for priority, num_slots in self._free_slots().items() if num_slots > 0]
        wake_s = min(wake_s, self._leasing.next_retry_s(free))
        return max(0.001, wake_s - now_s)
