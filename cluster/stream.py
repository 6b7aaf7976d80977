"""Items under way: lease, send, collect, retry elsewhere. Who adds them and hears of their ends is another's matter.

Everything happens in one thread, a step at a time: ordered.py steps for `encode_many`, the gateway for its requests.
An item is open from the moment it is added until it ends; each step moves it one place further:

    waiting -> (lease) -> leased -> (call) -> in a call -> done
       ^--------- refused, or its worker died --------'
"""

from __future__ import annotations

import itertools
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from cluster.client import Embedding, Outcome, Source
from cluster.leases import Lease, LeaseRequest, Refusal
from cluster.transport import WorkerAway, WorkerGone
from encoder.errors import (
    DeadlineError,
    EncoderPoolError,
    PoisonItemError,
    PoolClosedError,
    PoolSaturatedError,
    WorkerLostError,
)
from encoder.types import ItemShape
from workers.messages import EncodeBatch, EncodeItem, EncodeResult, ItemResult

if TYPE_CHECKING:
    from cluster.client import Client

MIN_RETRY_S, MAX_RETRY_S = 0.01, 0.5
TRIAL_RETRY_S = 0.05
LONGEST_WAIT_S = 1.0


@dataclass(slots=True, eq=False)
class Item:
    """An open item."""

    source: Source
    encoded: np.ndarray
    shape: ItemShape
    note: str | None
    read_s: float
    timeout_s: float | None
    on_end: Callable[[Outcome], None]  # called once, in the thread that steps
    not_before_s: float = 0.0
    refused_s: float | None = None  # since when nobody takes it
    deaths: int = 0  # workers that died with it on board
    exclude: set[str] = field(default_factory=set)
    lease: Lease | None = None
    is_open: bool = True

    @property
    def deadline_s(self) -> float | None:
        """When it is too late."""
        return None if self.timeout_s is None else self.read_s + self.timeout_s


@dataclass(slots=True, eq=False)
class Call:
    """Items on their way to one worker and back."""

    call_id: str
    worker_id: str
    incarnation: str
    items: list[Item]
    sent_s: float
    is_trial: bool  # its one item was on a dying worker


class Stream:
    """Open items of one owner. All methods but `__init__` belong to one thread."""

    def __init__(self, client: Client, *, sleep: Callable[[float], None] = time.sleep) -> None:
        """`sleep` passes the time while there is nothing but refusals to wait out."""
        self._client = client
        self._config = client.config
        self._transport = client.transport
        self._sleep = sleep
        self._waiting: deque[Item] = deque()
        self._leased: dict[str, deque[Item]] = {}  # by worker, until one of its call slots is free
        self._calls: dict[Any, Call] = {}
        self._num_ended = 0
        self._progress_s = time.monotonic()  # when this stream last got on
        self._num_poison = client.num_poison
        self._name = uuid.uuid4().hex
        self._numbers = itertools.count()
        self.open_bytes = 0  # encoded bytes of open items

    def add(self, item: Item) -> None:
        """Open an item."""
        self.open_bytes += item.encoded.nbytes
        self._waiting.append(item)

    def step(self, *, more: bool, wait: bool) -> None:
        """Move every item as far as it gets.

        Args:
            more: other items come at once, so a call that is not full may wait for them.
            wait: if nothing ends in this step, wait until something may have changed, LONGEST_WAIT_S at most.
        """
        num_ended = self._num_ended
        self._lease(more)
        self._send()
        self._collect(wait and self._num_ended == num_ended)

    def excuse(self, paused_s: float) -> None:
        """The owner did something else for so long: nobody was asked meanwhile, so nobody refused."""
        if paused_s > MAX_RETRY_S:
            self._progress_s = time.monotonic()

    def cancel(self, items: Sequence[Item]) -> None:
        """Nobody awaits these items any more: what of them has not begun is dropped, and they end no more."""
        dropped = {item for item in items if item.is_open}
        for item in dropped:
            item.is_open = False
            self.open_bytes -= item.encoded.nbytes
        self._waiting = deque(item for item in self._waiting if item not in dropped)
        for queue in self._leased.values():
            gone = [item for item in queue if item in dropped]
            self._give_back(gone)
            for item in gone:
                queue.remove(item)
        for call in self._calls.values():
            numbers = [number for number, item in enumerate(call.items) if item in dropped]
            if numbers:
                self._transport.cancel(call.worker_id, call.call_id, numbers)

    def close(self) -> None:
        """Leave nothing behind: queued work is dropped at the workers, unused leases return."""
        if self._client.closed:
            return
        for call in self._calls.values():
            self._transport.cancel(call.worker_id, call.call_id)
            self._end_trial(call)
        self._give_back([item for queue in self._leased.values() for item in queue])
        self._calls.clear()
        self._leased.clear()
        self._waiting.clear()

    # --- lease ---------------------------------------------------------------------------------------------------

    def _lease(self, more: bool) -> None:
        """Ask for as many leases as the free call slots can carry."""
        now_s = time.monotonic()
        self._drop_overdue(now_s)
        self._drop_poison()
        per_call = self._config.items_per_call
        num_leased = sum(len(queue) for queue in self._leased.values())
        num_slots = self._config.calls_per_worker * max(1, self._client.num_workers()) - len(self._calls)
        num_wanted = num_slots * per_call - num_leased
        ripe = [item for item in self._waiting if item.not_before_s <= now_s][: max(0, num_wanted)]
        if not ripe or (len(ripe) < per_call and self._calls and more):
            return  # full calls are cheaper; a short one goes when nothing more comes, or nobody works
        answers = self._transport.assign(
            [LeaseRequest(shape=item.shape, exclude=frozenset(item.exclude)) for item in ripe]
        )
        taken: set[Item] = set()
        for item, answer in zip(ripe, answers, strict=True):
            if isinstance(answer, Lease):
                item.lease = answer
                if item.deaths and not self._client.begin_trial(answer.worker_id):
                    self._transport.release([answer.lease_id])
                    item.not_before_s = time.monotonic() + TRIAL_RETRY_S
                    continue
                self._leased.setdefault(answer.worker_id, deque()).append(item)
                taken.add(item)
            elif self._refused(item, answer, time.monotonic(), behind_own=bool(taken or self._calls)):
                taken.add(item)
        self._waiting = deque(item for item in self._waiting if item not in taken)

    def _drop_overdue(self, now_s: float) -> None:
        overdue = [item for item in self._waiting if item.deadline_s is not None and item.deadline_s <= now_s]
        for item in overdue:
            self._waiting.remove(item)
            self._fail(item, DeadlineError(f"its deadline of {item.timeout_s:g} s passed before it ran"))

    def _drop_poison(self) -> None:
        """Look again at what waits whenever more content is in quarantine: copies of it may be here."""
        if self._num_poison == self._client.num_poison:
            return
        self._num_poison = self._client.num_poison
        for queue in (self._waiting, *self._leased.values()):
            for item in list(queue):
                try:
                    self._client.refuse_poison(item.encoded)
                except PoisonItemError as error:
                    queue.remove(item)
                    if queue is not self._waiting:
                        self._give_back([item])
                    self._fail(item, error)

    def _give_back(self, items: Sequence[Item]) -> None:
        """Leased items will not be sent."""
        leases = [item.lease for item in items if item.lease is not None]
        if leases:
            self._transport.release([lease.lease_id for lease in leases])
        for item, lease in zip(items, leases, strict=True):
            if item.deaths:
                self._client.end_trial(lease.worker_id)

    def _refused(self, item: Item, refusal: Refusal, now_s: float, *, behind_own: bool = False) -> bool:
        """Let an item come back later; True when it has waited too long and failed.

        While others of this stream get on, and `behind_own` calls, which have a limit of their own, it may wait.
        """
        if item.refused_s is None:
            item.refused_s = now_s
        if behind_own:
            self._progress_s = now_s
        waited_s = now_s - max(item.refused_s, self._progress_s)
        limit_s = self._config.saturated_timeout_s if refusal.saturated else self._config.recovery_timeout_s
        if waited_s >= limit_s:
            kind = PoolSaturatedError if refusal.saturated else WorkerLostError
            self._fail(item, kind(f"{refusal.message} (tried for {waited_s:.1f} s)"))
            return True
        item.not_before_s = now_s + min(MAX_RETRY_S, max(MIN_RETRY_S, refusal.retry_ms / 1e3))
        return False

    # --- send ----------------------------------------------------------------------------------------------------

    def _send(self) -> None:
        """Fill the free call slots of each worker.

        An item that was on a dying worker goes in a call of its own, and no other such item of any stream is there:
        should it kill this one too, nobody else is blamed.
        """
        calls_by_worker = Counter(call.worker_id for call in self._calls.values())
        for worker_id, queue in self._leased.items():
            while queue and calls_by_worker[worker_id] < self._config.calls_per_worker:
                suspects = [item for item in queue if item.deaths]
                items = suspects[:1] or list(queue)[: self._config.items_per_call]
                for item in items:
                    queue.remove(item)
                self._start_call(worker_id, items)
                calls_by_worker[worker_id] += 1

    def _start_call(self, worker_id: str, items: list[Item]) -> None:
        now_s = time.monotonic()
        call_id = f"{self._name}-{next(self._numbers)}"
        batch = EncodeBatch(call_id=call_id, items=tuple(_to_wire(item, now_s) for item in items))
        assert items[0].lease is not None
        call = Call(call_id, worker_id, items[0].lease.incarnation, items, now_s, is_trial=items[0].deaths > 0)
        try:
            self._calls[self._transport.start(worker_id, batch)] = call
        except PoolSaturatedError as error:
            self._give_back(items)
            again = Refusal(saturated=True, retry_ms=MAX_RETRY_S * 1e3, message=str(error))
            self._waiting.extendleft(
                item for item in reversed(items) if not self._refused(item, again, now_s, behind_own=bool(self._calls))
            )

    # --- collect -------------------------------------------------------------------------------------------------

    def _collect(self, wait: bool) -> None:
        wait_s = self._idle_s() if wait else 0.0
        if not self._calls:
            if wait_s:
                self._sleep(wait_s)
            return
        for ref in self._transport.wait(list(self._calls), wait_s):
            call = self._calls.pop(ref)
            try:
                result = self._transport.result(ref)
            except (WorkerAway, WorkerLostError):  # it restarts, starts or is closed: it took nothing on board
                self._leave(call)
                self._retry_elsewhere(call.items)
            except WorkerGone as error:
                self._bury(call, str(error))
            except EncoderPoolError as error:
                for item in call.items:
                    self._fail(item, error)
            else:
                self._settle(call, result)
            self._end_trial(call)  # only now: the router has heard of a death before another item tries
        now_s = time.monotonic()
        overdue = [ref for ref, call in self._calls.items() if now_s - call.sent_s > self._config.call_timeout_s]
        for ref in overdue:
            call = self._calls.pop(ref)
            self._transport.cancel(call.worker_id, call.call_id)
            self._bury(call, f"no answer within {self._config.call_timeout_s:g} s")
            self._end_trial(call)

    def _end_trial(self, call: Call) -> None:
        if call.is_trial:
            self._client.end_trial(call.worker_id)

    def _idle_s(self) -> float:
        """How long there is nothing to do but wait for a call."""
        now_s = time.monotonic()
        wake_s = now_s + LONGEST_WAIT_S
        if len(self._calls) < self._config.calls_per_worker * max(1, self._client.num_workers()):
            wake_s = min([wake_s, *(item.not_before_s for item in self._waiting)])
        return max(0.001, wake_s - now_s)

    def _settle(self, call: Call, result: EncodeResult) -> None:
        now_s = time.monotonic()
        offsets = result.offsets
        for number, (item, answer) in enumerate(zip(call.items, result.items, strict=True)):
            if answer.error is None:
                self._progress_s = now_s
                words_TE = result.tokens_TE[offsets[number] : offsets[number + 1]]
                self._finish(item, answer, words_TE, result, (now_s - call.sent_s) * 1e3)
                continue
            error = answer.error.to_error()
            if isinstance(error, PoolSaturatedError):
                again = Refusal(saturated=True, retry_ms=50.0, message=str(error))
                if not self._refused(item, again, now_s):
                    self._waiting.appendleft(item)
            elif isinstance(error, PoolClosedError):
                self._retry_elsewhere([item])
            elif isinstance(error, WorkerLostError):
                self._blame(item, call, str(error))
            else:
                self._fail(item, error)

    def _bury(self, call: Call, reason: str) -> None:
        """The call's worker died, or is as good as dead."""
        self._leave(call)
        for item in call.items:
            self._blame(item, call, reason)

    def _leave(self, call: Call) -> None:
        """Send nothing more to the call's worker."""
        self._transport.suspect(call.incarnation)
        unsent = list(self._leased.pop(call.worker_id, ()))
        self._give_back(unsent)
        self._retry_elsewhere(unsent)

    def _blame(self, item: Item, call: Call, reason: str) -> None:
        item.deaths += 1
        item.refused_s = None
        if item.deaths < self._config.poison_after:
            self._retry_elsewhere([item])
            return
        name = self._client.quarantine(item.encoded)
        self._fail(item, PoisonItemError(f"item {name} was on {item.deaths} workers that died (last: {reason})"))

    def _retry_elsewhere(self, items: list[Item]) -> None:
        for item in reversed(items):
            assert item.lease is not None
            item.exclude.add(item.lease.incarnation)
            item.lease = None
            self._waiting.appendleft(item)

    def _finish(
        self, item: Item, answer: ItemResult, words_TE: np.ndarray, result: EncodeResult, call_ms: float
    ) -> None:
        tokens_TE = torch.from_numpy(words_TE.copy())  # what Ray hands out is read-only and shared by the call
        if result.dtype == "bfloat16":
            tokens_TE = tokens_TE.view(torch.bfloat16)
        embedding = Embedding(
            tokens=tokens_TE,
            shape=item.shape,
            graphs=answer.graphs,
            misses=answer.misses,
            timings={
                **answer.timings_ms,
                "call": call_ms,
                "total": (time.monotonic() - item.read_s) * 1e3,
            },
            note=item.note,
            worker=result.worker_id,
        )
        self._end(item, Outcome(source=item.source, embedding=embedding, error=None))

    def _fail(self, item: Item, error: EncoderPoolError) -> None:
        self._end(item, Outcome(source=item.source, embedding=None, error=error))

    def _end(self, item: Item, outcome: Outcome) -> None:
        if not item.is_open:  # cancelled meanwhile
            return
        item.is_open = False
        self.open_bytes -= item.encoded.nbytes
        self._num_ended += 1
        item.on_end(outcome)


def _to_wire(item: Item, now_s: float) -> EncodeItem:
    assert item.lease is not None
    return EncodeItem(
        lease_id=item.lease.lease_id,
        encoded=item.encoded,
        shape=item.shape,
        timeout_s=None if item.deadline_s is None else max(0.0, item.deadline_s - now_s),
    )
