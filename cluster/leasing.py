"""Where a stream's items wait for a worker, and for one of its call slots once the router named one."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from cluster.items import Item, OpenItems
from cluster.leases import Lease, LeaseRequest, Refusal
from encoder.errors import DeadlineError, PoisonItemError, PoolSaturatedError, WorkerLostError

if TYPE_CHECKING:
    from cluster.client import Client

MIN_RETRY_S, MAX_RETRY_S = 0.01, 0.5
TRIAL_RETRY_S = 0.05


class Leasing:
    """The open items of one stream that are in no call."""

    def __init__(self, client: Client, items: OpenItems) -> None:
        self._client = client
        self._config = client.config
        self._items = items
        self._says_content = client.config.caches
        self._waiting: deque[Item] = deque()
        self._leased: dict[str, deque[Item]] = {}  # by worker, until one of its call slots is free
        self._num_poison = client.trials.num_poison

    def add(self, item: Item) -> None:
        """An item that was just opened."""
        self._waiting.append(item)

    def ask(self, *, num_calls: int, num_slots: int, more: bool) -> None:
        """Ask for as many leases as the free call slots can carry.

        Args:
            num_calls: calls under way.
            num_slots: calls that could be.
            more: other items come at once, so that a call that is not full may wait for them.
        """
        now_s = time.monotonic()
        self._drop_overdue(now_s)
        self._drop_poison()
        per_call = self._config.items_per_call
        num_leased = sum(len(queue) for queue in self._leased.values())
        num_wanted = (num_slots - num_calls) * per_call - num_leased
        ripe = [item for item in self._waiting if item.not_before_s <= now_s][: max(0, num_wanted)]
        if not ripe or (len(ripe) < per_call and num_calls and more):
            return  # full calls are cheaper; a short one goes when nothing more comes, or nobody works
        answers = self._client.transport.assign(
            [
                LeaseRequest(
                    shape=item.shape, exclude=frozenset(item.exclude), digest=item.digest if self._says_content else 0
                )
                for item in ripe
            ]
        )
        taken: set[Item] = set()
        for item, answer in zip(ripe, answers, strict=True):
            if isinstance(answer, Lease):
                item.lease = answer
                if item.deaths and not self._client.trials.begin(answer.worker_id):
                    self._client.transport.release([answer.lease_id])
                    item.not_before_s = time.monotonic() + TRIAL_RETRY_S
                    continue
                self._leased.setdefault(answer.worker_id, deque()).append(item)
                taken.add(item)
            elif self._refused(item, answer, time.monotonic(), behind_own=bool(taken or num_calls)):
                taken.add(item)
        self._waiting = deque(item for item in self._waiting if item not in taken)

    def workers(self) -> list[str]:
        """Workers that leased items wait for."""
        return [worker_id for worker_id, queue in self._leased.items() if queue]

    def take(self, worker_id: str) -> list[Item]:
        """Items for the next call to a worker; none when none wait for it.

        An item that was on a dying worker goes in a call of its own, and no other such item of any stream is there:
        should it kill this one too, nobody else is blamed.
        """
        queue = self._leased[worker_id]
        suspects = [item for item in queue if item.deaths]
        items = suspects[:1] or list(queue)[: self._config.items_per_call]
        for item in items:
            queue.remove(item)
        return items

    def next_retry_s(self) -> float:
        """When the first of those that wait may be asked for again; infinite when none wait."""
        return min((item.not_before_s for item in self._waiting), default=float("inf"))

    def come_back(self, items: Sequence[Item], refusal: Refusal, now_s: float, *, behind_own: bool = False) -> None:
        """Nobody takes these items now: they wait, in their old place, or fail after having waited too long."""
        self._waiting.extendleft(
            item
            for item in reversed(items)
            if item.is_open and not self._refused(item, refusal, now_s, behind_own=behind_own)
        )

    def _refused(self, item: Item, refusal: Refusal, now_s: float, *, behind_own: bool = False) -> bool:
        """Let an item come back later; True when it has waited too long and failed.

        While others of this stream get on, and `behind_own` calls, which have a limit of their own, it may wait.
        """
        if item.refused_s is None:
            item.refused_s = now_s
        if behind_own:
            self._items.progress_s = now_s
        waited_s = now_s - max(item.refused_s, self._items.progress_s)
        limit_s = self._config.saturated_timeout_s if refusal.saturated else self._config.recovery_timeout_s
        if waited_s >= limit_s:
            kind = PoolSaturatedError if refusal.saturated else WorkerLostError
            self._items.fail(item, kind(f"{refusal.message} (tried for {waited_s:.1f} s)"))
            return True
        item.not_before_s = now_s + min(MAX_RETRY_S, max(MIN_RETRY_S, refusal.retry_ms / 1e3))
        return False

    def retry_elsewhere(self, items: Sequence[Item]) -> None:
        """These go to another worker than their lease says, first of all."""
        for item in reversed(items):
            assert item.lease is not None
            item.exclude.add(item.lease.incarnation)
            item.lease = None
            if item.is_open:
                self._waiting.appendleft(item)

    def leave(self, worker_id: str) -> None:
        """What waits for a call slot of this worker goes elsewhere."""
        unsent = list(self._leased.pop(worker_id, ()))
        self.give_back(unsent)
        self.retry_elsewhere(unsent)

    def give_back(self, items: Sequence[Item]) -> None:
        """Leased items will not be sent."""
        leases = [item.lease for item in items if item.lease is not None]
        if leases:
            self._client.transport.release([lease.lease_id for lease in leases])
        for item, lease in zip(items, leases, strict=True):
            if item.deaths:
                self._client.trials.end(lease.worker_id)

    def cancel(self, dropped: Collection[Item]) -> None:
        """Nobody awaits these items any more."""
        self._waiting = deque(item for item in self._waiting if item not in dropped)
        for queue in self._leased.values():
            gone = [item for item in queue if item in dropped]
            self.give_back(gone)
            for item in gone:
                queue.remove(item)

    def clear(self) -> None:
        """Forget everything; unused leases return."""
        self.give_back([item for queue in self._leased.values() for item in queue])
        self._leased.clear()
        self._waiting.clear()

    def _drop_overdue(self, now_s: float) -> None:
        overdue = [item for item in self._waiting if item.deadline_s is not None and item.deadline_s <= now_s]
        for item in overdue:
            self._waiting.remove(item)
            late = DeadlineError(f"its deadline of {item.timeout_s:g} s passed before it ran")
            self._items.fail(item, late)

    def _drop_poison(self) -> None:
        """Look again at what waits whenever more content is in quarantine: copies of it may be here."""
        if self._num_poison == self._client.trials.num_poison:
            return
        self._num_poison = self._client.trials.num_poison
        for queue in (self._waiting, *self._leased.values()):
            for item in list(queue):
                try:
                    self._client.trials.refuse_poison(item.encoded)
                except PoisonItemError as error:
                    queue.remove(item)
                    if queue is not self._waiting:
                        self.give_back([item])
                    self._items.fail(item, error)
