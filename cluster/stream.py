"""One `encode_many` under way: read ahead, lease, send, collect, retry elsewhere, hand out in order.

Everything happens in the caller's thread, a step at a time, whenever it asks for the next outcome. An item is open
from the moment it is read until it has an outcome; each step moves it one place further:

    waiting -> (lease) -> leased -> (call) -> in a call -> done
       ^--------- refused, or its worker died --------'
"""

from __future__ import annotations

import itertools
import time
import uuid
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
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

READ_SLICE_S = 0.02  # reading pauses this often to look after calls
MIN_RETRY_S, MAX_RETRY_S = 0.01, 0.5
TRIAL_RETRY_S = 0.05
LONGEST_WAIT_S = 1.0


@dataclass(slots=True, eq=False)
class Item:
    """An open item."""

    index: int
    source: Source
    encoded: np.ndarray
    shape: ItemShape
    note: str | None
    read_s: float
    deadline_s: float | None
    not_before_s: float = 0.0
    refused_s: float | None = None  # since when nobody takes it
    deaths: int = 0  # workers that died with it on board
    exclude: set[str] = field(default_factory=set)
    lease: Lease | None = None


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
    """The state of one `encode_many`."""

    def __init__(self, client: Client, sources: Iterable[Source], *, timeout_s: float | None) -> None:
        self._client = client
        self._config = client.config
        self._transport = client.transport
        self._sources = enumerate(sources)
        self._timeout_s = timeout_s
        self._exhausted = False
        self._broken: Exception | None = None  # what the caller's iterator raised
        self._num_read = 0
        self._next_out = 0
        self._waiting: deque[Item] = deque()
        self._leased: dict[str, deque[Item]] = {}  # by worker, until one of its call slots is free
        self._calls: dict[Any, Call] = {}
        self._done: dict[int, Outcome] = {}
        self._open_bytes = 0
        self._progress_s = time.monotonic()  # when this stream last got on
        self._num_poison = client.num_poison
        self._name = uuid.uuid4().hex
        self._numbers = itertools.count()

    def outcomes(self) -> Iterator[Outcome]:
        """Outcomes in the order of the sources."""
        while True:
            self._read()
            self._lease()
            self._send()
            self._collect()
            for _ in range(self._config.items_per_call):  # then the workers want to be looked after again
                outcome = self._done.pop(self._next_out, None)
                if outcome is None:
                    break
                self._next_out += 1
                given_s = time.monotonic()
                yield outcome
                if time.monotonic() - given_s > MAX_RETRY_S:  # the caller took its time: nobody was asked meanwhile
                    self._progress_s = time.monotonic()
            if self._exhausted and self._next_out == self._num_read:
                if self._broken is not None:
                    raise self._broken
                return
            if self._client.closed:
                raise PoolClosedError("the pool was closed while items were under way")

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

    # --- read ----------------------------------------------------------------------------------------------------

    def _has_room(self) -> bool:
        return (
            not self._exhausted
            and self._num_read - self._next_out < self._config.max_in_flight_items
            and self._open_bytes < self._config.max_in_flight_bytes
        )

    def _read(self) -> None:
        started_s = time.monotonic()
        while self._has_room() and time.monotonic() - started_s < READ_SLICE_S:
            try:
                index, source = next(self._sources)
            except StopIteration:
                self._exhausted = True
                return
            except Exception as error:  # the caller's own; what was read before it comes out first
                self._exhausted, self._broken = True, error
                return
            self._num_read += 1
            now_s = time.monotonic()
            try:
                encoded, header, shape = self._client.read(source)
            except EncoderPoolError as error:
                self._done[index] = Outcome(source=source, embedding=None, error=error)
                continue
            self._open_bytes += encoded.nbytes
            deadline_s = None if self._timeout_s is None else now_s + self._timeout_s
            self._waiting.append(Item(index, source, encoded, shape, header.note, now_s, deadline_s))

    # --- lease ---------------------------------------------------------------------------------------------------

    def _lease(self) -> None:
        """Ask for as many leases as the free call slots can carry."""
        now_s = time.monotonic()
        self._drop_overdue(now_s)
        self._drop_poison()
        per_call = self._config.items_per_call
        num_leased = sum(len(queue) for queue in self._leased.values())
        num_slots = self._config.calls_per_worker * max(1, self._client.num_workers()) - len(self._calls)
        num_wanted = num_slots * per_call - num_leased
        ripe = [item for item in self._waiting if item.not_before_s <= now_s][: max(0, num_wanted)]
        if not ripe or (len(ripe) < per_call and self._calls and self._has_room()):
            return  # full calls are cheaper; a short one goes when nothing more can be read, or nobody works
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
            self._fail(item, DeadlineError(f"its deadline of {self._timeout_s:g} s passed before it ran"))

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

    def _collect(self) -> None:
        wait_s = self._idle_s()
        if not self._calls:
            if wait_s:
                time.sleep(wait_s)
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
        if self._next_out in self._done or self._has_room():
            return 0.0
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
        assert item.index not in self._done
        assert item.index >= self._next_out
        self._open_bytes -= item.encoded.nbytes
        self._done[item.index] = outcome


def _to_wire(item: Item, now_s: float) -> EncodeItem:
    assert item.lease is not None
    return EncodeItem(
        lease_id=item.lease.lease_id,
        encoded=item.encoded,
        shape=item.shape,
        timeout_s=None if item.deadline_s is None else max(0.0, item.deadline_s - now_s),
    )
