"""A stream's calls to workers: sent, collected, settled item by item, and buried with the worker they were on."""

from __future__ import annotations

import itertools
import time
import uuid
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from cluster.routing.leases import Refusal
from cluster.streams.items import Item, OpenItems
from cluster.streams.leasing import MAX_RETRY_S, Leasing
from cluster.streams.session import Session
from cluster.streams.transport import WorkerAway, WorkerGone
from encoder.errors import EncoderPoolError, PoisonItemError, PoolClosedError, PoolSaturatedError, WorkerLostError
from workers import spans
from workers.messages import EncodeBatch, EncodeItem, EncodeResult
from workers.priority import Priority

FULL_RETRY_MS = 50.0  # before a worker that had no room is asked again


@dataclass(slots=True, eq=False)
class Call:
    """Items on their way to one worker and back."""

    call_id: str
    worker_id: str
    incarnation: str
    items: list[Item]
    sent_s: float
    waits_since_s: float  # since it was sent, or a call before it was answered: the worker gets on
    priority: Priority
    is_trial: bool  # its one item was on a dying worker
    span: spans.SharedSpan  # from its start to its answer


class Calls:
    """The calls of one stream that are under way. Each of their items ends, or goes back to `leasing`."""

    def __init__(self, session: Session, items: OpenItems, leasing: Leasing) -> None:
        self._session = session
        self._config = session.config
        self._transport = session.transport
        self._items = items
        self._leasing = leasing
        self._calls: dict[Any, Call] = {}
        self._name = uuid.uuid4().hex
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._calls)

    def count(self, priority: Priority) -> int:
        """How many are of this priority."""
        return sum(call.priority is priority for call in self._calls.values())

    def send(self) -> None:
        """Fill the free call slots of each worker."""
        num_calls = Counter((call.worker_id, call.priority) for call in self._calls.values())
        for seat in self._leasing.seats():
            while num_calls[seat] < self._config.calls_per_worker:
                items = self._leasing.take(seat)
                if not items:
                    break
                self._start(seat[0], items)
                num_calls[seat] += 1

    def _start(self, worker_id: str, items: list[Item]) -> None:
        now_s = time.monotonic()
        call_id = f"{self._name}-{next(self._numbers)}"
        first = items[0]
        span = spans.SharedSpan("encpool.call", [item.trace for item in items], worker=worker_id)
        batch = EncodeBatch(
            call_id=call_id,
            items=tuple(_to_wire(item, now_s) for item in items),
            priority=first.priority,
            traces=span.headers,
            client=self._session.client_id,
            num_outputs=sum(item.shape.num_tokens for item in items) * self._session.adapter.hidden_size,
        )
        assert first.lease is not None
        is_trial = first.is_suspect
        call = Call(call_id, worker_id, first.lease.incarnation, items, now_s, now_s, first.priority, is_trial, span)
        try:
            self._calls[self._transport.start(worker_id, batch)] = call
        except PoolSaturatedError as error:
            span.end()
            self._leasing.give_back(items)
            again = Refusal(saturated=True, retry_ms=MAX_RETRY_S * 1e3, message=str(error))
            self._leasing.come_back(items, again, now_s, behind_own=bool(self._calls))

    def collect(self, wait_s: float) -> None:
        """Take in what is done; wait for the first call to be so, at most so long."""
        for ref in self._transport.wait(list(self._calls), wait_s):
            call = self._calls.pop(ref)
            call.span.end()
            try:
                result = self._transport.result(ref)
            except (WorkerAway, WorkerLostError):  # it restarts, starts or is closed: it took nothing on board
                self._leave(call)
                self._count_retries("away", len(call.items))
                self._leasing.retry_elsewhere(call.items)
            except WorkerGone as error:
                self._bury(call, str(error))
            except EncoderPoolError as error:
                self._transport.release([item.lease.lease_id for item in call.items if item.lease is not None])
                for item in call.items:
                    self._items.fail(item, error)
            else:
                self._settle(call, result)
                self._excuse_those_behind(call)
            self._end_trial(call)  # only now: the router has heard of a death before another item tries
        now_s = time.monotonic()
        overdue = [ref for ref, call in self._calls.items() if now_s - call.waits_since_s > self._config.call_timeout_s]
        for ref in overdue:
            call = self._calls.pop(ref)
            call.span.end()
            self._transport.cancel(call.worker_id, call.call_id)
            self._bury(call, f"no answer within {self._config.call_timeout_s:g} s")
            self._end_trial(call)

    def _excuse_those_behind(self, answered: Call) -> None:
        """A worker that decodes for minutes what is queued is not dead while it answers one call after the other.

        Those sent before have no excuse: they should have been answered first.
        """
        now_s = time.monotonic()
        for call in self._calls.values():
            is_behind = call.incarnation == answered.incarnation and call.sent_s >= answered.sent_s
            if is_behind and call.priority is answered.priority:
                call.waits_since_s = now_s

    def cancel(self, dropped: Collection[Item]) -> None:
        """Nobody awaits these items any more."""
        for call in self._calls.values():
            numbers = [number for number, item in enumerate(call.items) if item in dropped]
            if numbers:
                self._transport.cancel(call.worker_id, call.call_id, numbers)

    def clear(self) -> None:
        """Drop what is queued at the workers."""
        for call in self._calls.values():
            call.span.end()
            self._transport.cancel(call.worker_id, call.call_id)
            self._end_trial(call)
        self._calls.clear()

    def _end_trial(self, call: Call) -> None:
        if call.is_trial:
            self._session.trials.end(call.worker_id)
            self._leasing.wake_suspects()

    def _settle(self, call: Call, result: EncodeResult) -> None:
        now_s = time.monotonic()
        at_worker_ms = max((sum(answer.timings_ms.values()) for answer in result.items), default=0.0)
        on_the_way_s = max(0.0, now_s - call.sent_s - at_worker_ms / 1e3)
        self._session.meter.observe("encpool_stage_seconds", "transfer", value=on_the_way_s)
        offsets, full, why = result.offsets, [], ""
        for number, (item, answer) in enumerate(zip(call.items, result.items, strict=True)):
            if answer.error is None:
                self._items.progress_s = now_s
                words_TE = result.tokens_TE[offsets[number] : offsets[number + 1]]
                self._items.finish(item, answer, words_TE, result, (now_s - call.sent_s) * 1e3)
                continue
            error = answer.error.to_error()
            if isinstance(error, PoolSaturatedError):
                full.append(item)
                why = str(error)
            elif isinstance(error, PoolClosedError):
                self._count_retries("draining", 1)
                self._leasing.retry_elsewhere([item])
            elif isinstance(error, WorkerLostError):
                self._blame(item, call, str(error))
            else:
                self._items.fail(item, error)
        if full:
            self._count_retries("full", len(full))
            self._leasing.turn_away(full, Refusal(saturated=True, retry_ms=FULL_RETRY_MS, message=why), now_s)

    def _count_retries(self, reason: str, num_items: int) -> None:
        self._session.meter.add("encpool_retries_total", reason, amount=num_items)

    def _bury(self, call: Call, reason: str) -> None:
        """The call's worker died, or is as good as dead."""
        self._leave(call)
        if not call.is_trial:
            self._session.trials.note_death(call.incarnation)
        for item in call.items:
            self._blame(item, call, reason)

    def _leave(self, call: Call) -> None:
        """Send nothing more to the call's worker."""
        self._transport.suspect(call.incarnation)
        self._leasing.leave(call.worker_id)

    def _blame(self, item: Item, call: Call, reason: str) -> None:
        num_deaths = self._session.trials.blame(item.encoded, call.incarnation, alone=call.is_trial)
        item.is_suspect, item.refused_s = True, None
        if not call.is_trial or num_deaths < self._config.poison_after:
            self._count_retries("died", 1)
            self._leasing.retry_elsewhere([item])
            return
        self._session.meter.add("encpool_quarantines_total")
        name = self._session.trials.quarantine(item.encoded)
        poison = PoisonItemError(f"workers died with item {name} on board, the last one with nothing else: {reason}")
        self._items.fail(item, poison)


def _to_wire(item: Item, now_s: float) -> EncodeItem:
    assert item.lease is not None
    return EncodeItem(
        lease_id=item.lease.lease_id,
        encoded=item.encoded,
        shape=item.shape,
        scope=item.scope,
        timeout_s=None if item.deadline_s is None else max(0.0, item.deadline_s - now_s),
    )
