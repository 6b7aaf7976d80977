"""Whatever the transport does, every item ends in exactly one outcome, and quarantine holds for the whole pool."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from fake_pool import PICTURES, FakePool, client, encoded, retrying_soon
from fakes import fake_adapter
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cluster.routing.leases import Answer, Ask, Refusal
from cluster.routing.router import Router
from cluster.streams.outcomes import Outcome
from cluster.streams.transport import WorkerAway, WorkerGone
from encoder.errors import (
    ConfigError,
    DeadlineError,
    EncodeError,
    PoisonItemError,
    PoolSaturatedError,
    WorkerLostError,
)
from workers.messages import EncodeBatch, EncodeResult, ErrorNote
from workers.priority import Priority

FAULTS = ["fine", "lose", "delay", "no room", "die", "away", "refuse", "closed", "lost", "whole", "poisoned"]
NOTES = {"refuse": "PoolSaturatedError", "closed": "PoolClosedError", "poisoned": "DeadlineError"}
LEASE_FAULTS = ["fine", "fine", "fine", "away", "restart", "all die"]


class FaultyPool(FakePool):
    """Loses calls and answers, delays them, kills workers and the router, as a script says."""

    def __init__(self, faults: Sequence[str], lease_faults: Sequence[str]) -> None:
        super().__init__("abc")
        self._faults, self._lease_faults = iter(faults), iter(lease_faults)
        self._late: dict[int, int] = {}  # calls that are not done for so many looks
        self._fault_of: dict[int, str] = {}
        self._current = "fine"
        self.answer = self._answer

    def lease(self, ask: Ask) -> Answer:
        fault = next(self._lease_faults, "fine")
        if fault == "away":
            return Answer(
                0, [Refusal(saturated=False, retry_ms=1, message="the router does not answer")] * len(ask.which)
            )
        if fault in ("restart", "all die"):
            self.router = Router(
                fake_adapter(), lease_timeout_s=60, silent_timeout_s=1e9, now_s=self.clock, rng=random.Random(1)
            )
            for name in self.incarnations:  # workers outlive their router, unless they die with it
                (self.restart if fault == "all die" else self.register)(name)
        return super().lease(ask)

    def start(self, worker_id: str, batch: EncodeBatch) -> Any:
        fault = next(self._faults, "fine")
        if fault == "no room":
            raise PoolSaturatedError("the object store is full")
        call = super().start(worker_id, batch)
        self._fault_of[call] = fault
        if fault in ("lose", "delay"):
            self._late[call] = 10**9 if fault == "lose" else 3
        return call

    def wait(self, calls: Sequence[Any], timeout_s: float) -> list[Any]:
        for call in self._late:
            self._late[call] -= 1
        done = [call for call in calls if self._late.get(call, 0) <= 0]
        if not done:
            time.sleep(min(timeout_s, 0.001))
        return super().wait(done, timeout_s) if done else []

    def result(self, call: Any) -> EncodeResult:
        self._current = self._fault_of.get(call, "fine")
        return super().result(call)

    def _answer(self, worker_id: str, batch: EncodeBatch) -> EncodeResult:
        fault = self._current
        if fault in ("die", "away", "lost", "closed"):  # who drains never takes anything again: another comes
            self.restart(worker_id)
        if fault == "die":
            raise WorkerGone("killed")
        if fault == "away":
            raise WorkerAway("The actor is restarting")
        if fault == "lost":
            raise WorkerLostError("w is starting")
        if fault == "whole":
            raise EncodeError("a bug")
        note = ErrorNote(name=NOTES.get(fault, ""), message="retry in 1 ms")
        return encoded(worker_id, batch, failing={0: note} if fault in NOTES else {})

    def suspect(self, incarnation: str) -> None:
        super().suspect(incarnation)
        name, number = incarnation.split("/")
        if self.incarnations[name] == int(number):
            self.restart(name)


@settings(max_examples=40, deadline=None)
@given(
    faults=st.lists(st.sampled_from(FAULTS), max_size=30),
    lease_faults=st.lists(st.sampled_from(LEASE_FAULTS), max_size=12),
)
@example(faults=["fine", "away"], lease_faults=["fine", "restart", "fine", "restart"])
@example(faults=["fine", "away"], lease_faults=["fine", "all die", "fine", "all die"])
@retrying_soon()
def test_every_item_of_two_streams_ends_in_exactly_one_outcome(faults: list[str], lease_faults: list[str]) -> None:
    pool = FaultyPool(faults, lease_faults)
    one = client(pool, recovery_timeout_s=5, call_timeout_s=0.01)
    streams: dict[Priority, Iterator[Outcome]] = {
        priority: one.encode_many(PICTURES[:12], priority=priority) for priority in Priority
    }
    outcomes: dict[Priority, list[Outcome]] = {priority: [] for priority in Priority}
    while streams:
        for priority, stream in list(streams.items()):
            outcome = next(stream, None)
            if outcome is None:
                del streams[priority]
            else:
                outcomes[priority].append(outcome)
    for ended in outcomes.values():
        assert [outcome.source for outcome in ended] == PICTURES[:12]
        for outcome in ended:
            if outcome.embedding is not None:
                assert outcome.error is None
                assert outcome.embedding.tokens.unique().tolist() == [len(outcome.source)]  # type: ignore[arg-type]
            else:
                assert isinstance(outcome.error, PoisonItemError | EncodeError | DeadlineError)
    if not {"die", "lose", "whole", "poisoned", "delay", "all die"} & {*faults, *lease_faults}:
        assert all(outcome.error is None for ended in outcomes.values() for outcome in ended)
    assert pool.in_flight_ms() == 0
    assert one.trials.begin("a")  # no trial is left open
    assert one.trials.begin("b")
    assert one.trials.begin("c")


def test_interactive_items_have_calls_of_their_own_beside_those_of_batch_items() -> None:
    pool = FakePool("a")
    priorities: list[Priority] = []

    def answer(worker_id: str, batch: EncodeBatch) -> EncodeResult:
        priorities.append(batch.priority)
        return encoded(worker_id, batch)

    pool.answer = answer
    pool.newest_first = False
    one = client(pool)
    stream = one.encode_many(PICTURES)
    next(stream)
    num_under_way = len(pool.calls)
    assert num_under_way > 0
    assert one.encode(PICTURES[0]).worker == "a"
    assert priorities[-1] is Priority.INTERACTIVE
    assert len(pool.calls) == num_under_way  # nobody waited for those
    list(stream)
    assert set(priorities[:-1]) == {Priority.INTERACTIVE, Priority.BATCH}
    with pytest.raises(ConfigError, match="no priority 'urgent': it is 'interactive' or 'batch'"):
        one.encode(PICTURES[0], priority="urgent")


def poisoned(pool: FakePool, poison: bytes) -> None:
    def answer(worker_id: str, batch: EncodeBatch) -> EncodeResult:
        if any(item.encoded.tobytes() == poison for item in batch.items):
            pool.restart(worker_id)
            raise WorkerGone("segmentation fault")
        return encoded(worker_id, batch)

    pool.answer = answer


def test_what_one_client_put_into_quarantine_no_other_client_sends() -> None:
    pool = FakePool("ab")
    poison = PICTURES[5]
    poisoned(pool, poison)
    with pytest.raises(PoisonItemError, match="the last one with nothing else: segmentation fault"):
        client(pool).encode(poison)
    num_calls, others = len(pool.log), client(pool)
    outcomes = list(others.encode_many([PICTURES[0], poison, PICTURES[1]]))
    assert [type(outcome.error) for outcome in outcomes] == [type(None), PoisonItemError, type(None)]
    assert sum(number for _, number in pool.log[num_calls:]) == 2


def test_where_workers_die_for_other_reasons_an_item_is_tried_more_often() -> None:
    pool = FakePool("abcdef")
    died: list[int] = []  # with so many items on board

    def answer(worker_id: str, batch: EncodeBatch) -> EncodeResult:
        is_trial = len(batch.items) == 1
        if (len(died) < 3 and not is_trial) or (3 <= len(died) < 5 and is_trial):
            died.append(len(batch.items))
            pool.restart(worker_id)
            raise WorkerGone("out of memory")
        return encoded(worker_id, batch)

    pool.answer = answer
    outcomes = list(client(pool).encode_many(PICTURES[:24]))
    assert [number > 1 for number in died] == [True] * 3 + [False] * 2
    assert all(outcome.error is None for outcome in outcomes)
