"""Where a stream's items wait for a worker, and for one of its call slots once the router named one."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice

from cluster.routing.leases import Lease, LeaseRequest, Refusal
from cluster.streams.items import Item, OpenItems
from cluster.streams.session import Session
from encoder.errors import DeadlineError, PoisonItemError, PoolSaturatedError, WorkerLostError
from workers.priority import Priority

logger = logging.getLogger(__name__)

Seat = tuple[str, Priority]
"""A worker, and of which priority the calls are that items wait for."""

MIN_RETRY_S, MAX_RETRY_S = 0.01, 0.5
TRIAL_RETRY_S = 0.05
NOTICE_S = 1.0  # without a worker; one that comes back sooner is not worth a word


class Leasing:
    """The open items of one stream that are in no call."""

    def __init__(self, session: Session, items: OpenItems) -> None:
        self._session = session
        self._config = session.config
        self._items = items
        self._says_content = session.says_content
        self._waiting: deque[Item] = deque()
        self._leased: dict[Seat, deque[Item]] = {}  # by worker, until one of its call slots is free
        self._poison = session.trials.edition
        self._has_told = False  # of having no worker, since there was one

    def add(self, item: Item) -> None:
        """An item that was just opened."""
        self._waiting.append(item)

    def ask(self, free_slots: Mapping[Priority, int], *, is_idle: bool, more: bool) -> None:
        """Ask for as many leases as the free call slots can carry.

        Args:
            free_slots: calls that may be started.
            is_idle: no call is under way.
            more: other items come at once, so that a call that is not full may wait for them.
        """
        self._drop_overdue(time.monotonic())
        self._drop_poison()
        for priority, num_slots in free_slots.items():
            self._ask(priority, num_slots, is_idle=is_idle, more=more)
        self._drop_poison()  # the router may have told of some

    def _ask(self, priority: Priority, num_slots: int, *, is_idle: bool, more: bool) -> None:
        now_s = time.monotonic()
        per_call = self._config.items_per_call
        num_leased = sum(len(queue) for seat, queue in self._leased.items() if seat[1] is priority)
        num_wanted = max(0, num_slots * per_call - num_leased)
        ripe = list(islice(self._ripe(priority, now_s), num_wanted))
        can_wait = len(ripe) < per_call and not is_idle and more and not any(item.avoided for item in ripe)
        if not ripe or can_wait:
            return  # full calls are cheaper; a short one goes when nothing more comes, nobody works, or it went before
        requests = [
            LeaseRequest(
                shape=item.shape,
                num_bytes=item.encoded.nbytes,
                exclude=item.avoided,
                digest=item.digest if self._says_content and item.scope is not None else 0,
            )
            for item in ripe
        ]
        answers = self._session.assign(requests, priority, traces=[item.trace for item in ripe])
        taken: set[Item] = set()
        gets_on = not is_idle
        num_refused = 0
        for item, answer in zip(ripe, answers, strict=True):
            if isinstance(answer, Lease):
                item.lease = answer
                if item.is_suspect and not self._session.trials.begin(answer.worker_id):
                    self._session.transport.release([answer.lease_id])
                    item.not_before_s = time.monotonic() + TRIAL_RETRY_S
                    continue
                self._has_told = False
                self._leased.setdefault((answer.worker_id, priority), deque()).append(item)
                taken.add(item)
                gets_on = True
                continue
            if item.turned_away is not None:  # and nobody else takes it
                (_, said), item.turned_away = item.turned_away, None
                answer = answer if answer.saturated else said
            if self._refused(item, answer, time.monotonic(), behind_own=gets_on, turn=1 + num_refused // per_call):
                taken.add(item)
            num_refused += answer.saturated
        self._waiting = deque(item for item in self._waiting if item not in taken)

    def _ripe(self, priority: Priority, now_s: float) -> Iterator[Item]:
        """Those that may be asked for now; of suspects no more than workers can try."""
        num_trials = max(1, self._session.num_workers()) - self._session.trials.num_open
        for item in self._waiting:
            if item.priority is not priority or item.not_before_s > now_s:
                continue
            if item.is_suspect:
                num_trials -= 1
                if num_trials < 0:
                    item.not_before_s = now_s + TRIAL_RETRY_S
                    continue
            yield item

    def wake_suspects(self) -> None:
        """A worker is free to try the next one."""
        for item in self._waiting:
            if item.is_suspect:
                item.not_before_s = 0.0

    def seats(self) -> list[Seat]:
        """Where leased items wait."""
        return [seat for seat, queue in self._leased.items() if queue]

    def take(self, seat: Seat) -> list[Item]:
        """Items for the next call; none when none wait there.

        An item that was on a dying worker goes in a call of its own, and no other such item of any stream is there:
        should it kill this one too, nobody else is blamed.
        """
        queue = self._leased[seat]
        suspects = [item for item in queue if item.is_suspect]
        items = suspects[:1] or list(queue)[: self._config.items_per_call]
        for item in items:
            queue.remove(item)
        return items

    def next_retry_s(self, priorities: Sequence[Priority]) -> float:
        """When the first of those that wait may be asked for again; infinite when none wait."""
        waiting = (item.not_before_s for item in self._waiting if item.priority in priorities)
        return min(waiting, default=float("inf"))

    def come_back(self, items: Sequence[Item], refusal: Refusal, now_s: float, *, behind_own: bool = False) -> None:
        """Nobody takes these items now: they wait, in their old place, or fail after having waited too long."""
        self._waiting.extendleft(
            item
            for item in reversed(items)
            if item.is_open and not self._refused(item, refusal, now_s, behind_own=behind_own)
        )

    def _refused(self, item: Item, refusal: Refusal, now_s: float, *, behind_own: bool = False, turn: int = 1) -> bool:
        """Let an item come back later; True when it has waited too long and failed.

        While others of this stream get on, and `behind_own` calls, which have a limit of their own, it may wait.
        It comes back once `turn` times the room it waits for may be there: streams that all asked for all they have
        every few milliseconds would keep the router of a full pool from everything else.
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
        if waited_s >= NOTICE_S and not refusal.saturated and not self._has_told:
            self._has_told = True
            logger.warning("%s; trying again for %.6g s at most", refusal.message, limit_s)
        item.not_before_s = now_s + min(MAX_RETRY_S, turn * max(MIN_RETRY_S, refusal.retry_ms / 1e3))
        return False

    def turn_away(self, items: Sequence[Item], refusal: Refusal, now_s: float) -> None:
        """The worker has no room for these, which the router did not know: they try another at once, then they wait."""
        self.come_back([item for item in items if item.turned_away is not None], refusal, now_s)
        for item in reversed(items):
            if item.turned_away is not None:
                item.turned_away = None
                continue
            assert item.lease is not None
            item.turned_away, item.lease = (item.lease.incarnation, refusal), None
            item.refused_s = now_s if item.refused_s is None else item.refused_s
            if item.is_open:
                self._waiting.appendleft(item)

    def retry_elsewhere(self, items: Sequence[Item]) -> None:
        """These go to another worker than their lease says, first of all."""
        for item in reversed(items):
            assert item.lease is not None
            item.exclude.add(item.lease.incarnation)
            item.lease = item.turned_away = None
            if item.is_open:
                self._waiting.appendleft(item)

    def leave(self, worker_id: str) -> None:
        """What waits for a call slot of this worker goes elsewhere."""
        unsent = [item for priority in Priority for item in self._leased.pop((worker_id, priority), ())]
        self.give_back(unsent)
        self.retry_elsewhere(unsent)

    def give_back(self, items: Sequence[Item]) -> None:
        """Leased items will not be sent."""
        leases = [item.lease for item in items if item.lease is not None]
        if leases:
            self._session.transport.release([lease.lease_id for lease in leases])
        for item, lease in zip(items, leases, strict=True):
            if item.is_suspect:
                self._session.trials.end(lease.worker_id)

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
        if self._poison == self._session.trials.edition:
            return
        self._poison = self._session.trials.edition
        for queue in (self._waiting, *self._leased.values()):
            for item in list(queue):
                try:
                    self._session.trials.refuse_poison(item.encoded)
                except PoisonItemError as error:
                    queue.remove(item)
                    if queue is not self._waiting:
                        self.give_back([item])
                    self._items.fail(item, error)
