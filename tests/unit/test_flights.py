"""A worker with a cache: identical items run once, and what befalls one caller befalls no other."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest
import torch
from fakes import Clock, FakeRunner, batch, breaks_on, errors, graph, item, loader, picture, until

from encoder.config import EncoderConfig
from encoder.errors import DeadlineError, EncodeError
from workers.cache import CacheStats, EmbeddingCache
from workers.config import WorkerConfig
from workers.flights import Flights
from workers.job import Job
from workers.messages import EncodeBatch, EncodeItem, EncodeResult
from workers.worker import EncoderWorker

PICTURE = picture(7)


class Rig:
    """A worker whose one slow launch can be held, and callers in threads."""

    def __init__(self, *, cache_bytes: int = 2**20, **settings: object) -> None:
        self.clock = Clock()
        self.runner = FakeRunner([graph(2)])  # a segment a replay
        self.settled: list[int] = []
        config = WorkerConfig.model_validate(
            {"encoder": EncoderConfig(model="fake"), "device": "cpu", "decode_threads": 2, "cache_bytes": cache_bytes}
            | settings
        )
        self.worker = EncoderWorker(
            config, "w", load=loader(self.runner), on_settled=self.settled.append, now_s=self.clock
        )
        self.worker.start()
        self.worker.wait_started(20)
        self.runner.runs.clear()
        self.callers = ThreadPoolExecutor(8)

    def call(self, name: str, encoded: bytes = PICTURE, **changes: object) -> Future[EncodeResult]:
        """Encode one picture in a thread of its own, and wait until it is on board."""
        wire = EncodeItem(**{**as_fields(item(ord(name), encoded)), **changes})  # type: ignore[arg-type]
        before = self.stats
        future = self.callers.submit(self.worker.encode, EncodeBatch(call_id=name, items=(wire,)))
        until(lambda: future.done() or self.stats.misses + self.stats.joins > before.misses + before.joins)
        return future

    @property
    def stats(self) -> CacheStats:
        return self.worker.report().stats.cache

    @property
    def brightnesses(self) -> list[int]:
        """Of the segments that ran, in order."""
        return [int(segment.patches_PC[0, 0]) for _, segments in self.runner.runs for segment in segments]

    def hold(self) -> Future[EncodeResult]:
        """Keep the device busy with two other pictures, so that what comes now waits."""
        self.runner.gate.clear()
        two = batch(picture(1), picture(2), call_id="hold")
        future = self.callers.submit(self.worker.encode, two)
        until(lambda: len(self.runner.runs) == 2)
        return future


def as_fields(wire: EncodeItem) -> dict[str, object]:
    return {name: getattr(wire, name) for name in wire.__slots__}


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.runner.gate.set()
    rig.worker.close()
    rig.callers.shutdown()


def test_an_item_seen_before_is_answered_without_decoding_or_running(rig: Rig) -> None:
    first = rig.worker.encode(batch(PICTURE))
    until(lambda: rig.stats.num_entries == 1)
    again = rig.worker.encode(batch(PICTURE))
    assert again.tokens_TE.tolist() == first.tokens_TE.tolist()
    assert (first.items[0].cached, again.items[0].cached) == (False, True)
    assert again.items[0].timings_ms.keys() == {"cache"}
    assert rig.brightnesses == [7]
    assert rig.stats.hits == 1
    assert rig.settled == [0, 0]


def test_an_answer_is_a_copy_that_its_owner_may_change(rig: Rig) -> None:
    for _ in range(3):
        result = rig.worker.encode(batch(PICTURE))
        assert np.unique(result.tokens_TE).tolist() == [7.0]
        result.tokens_TE[:] = -1.0
        until(lambda: rig.stats.num_entries == 1)


def test_identical_items_in_progress_run_once(rig: Rig) -> None:
    held = rig.hold()
    calls = [rig.call(name) for name in "abc"]
    assert rig.stats.joins == 2
    rig.runner.gate.set()
    results = [call.result(20) for call in (*calls, held)]
    assert [errors(result) for result in results] == [[None], [None], [None], [None, None]]
    assert [result.items[0].cached for result in results[:3]] == [False, True, True]
    assert sorted(rig.brightnesses) == [1, 2, 7]
    assert sorted(rig.settled) == [0, 1, *map(ord, "abc")]


def test_copies_in_one_call_run_once(rig: Rig) -> None:
    result = rig.worker.encode(batch(PICTURE, PICTURE, picture(9), PICTURE))
    assert [answer.cached for answer in result.items] == [False, True, False, True]
    assert result.tokens_TE[:, 0].tolist() == [7, 7, 7, 7, 9, 9, 7, 7]


def test_the_failure_of_one_is_told_to_all_who_wait_and_is_not_kept(rig: Rig) -> None:
    held = rig.hold()
    calls = [rig.call(name, picture(66)) for name in "abc"]
    rig.runner.break_run = breaks_on(66, ValueError("boom"))
    rig.runner.gate.set()
    assert [errors(call.result(20)) for call in calls] == [["EncodeError"]] * 3
    assert errors(held.result(20)) == [None, None]
    rig.runner.break_run = lambda segments, replay: None
    assert errors(rig.worker.encode(batch(picture(66)))) == [None]


def test_a_damaged_picture_fails_all_its_copies_and_nobody_else(rig: Rig) -> None:
    damaged = picture(6, width=90, height=90)
    damaged = damaged[: len(damaged) // 2]
    assert errors(rig.worker.encode(batch(damaged, PICTURE, damaged))) == ["BadMediaError", None, "BadMediaError"]


def test_cancelling_the_first_leaves_the_others_their_work(rig: Rig) -> None:
    held = rig.hold()
    first, second = rig.call("a"), rig.call("b")
    rig.worker.cancel("a")
    assert errors(first.result(20)) == ["EncodeError"]
    rig.runner.gate.set()
    assert errors(second.result(20)) == [None]
    held.result(20)
    assert sorted(rig.brightnesses) == [1, 2, 7]


def test_work_that_everyone_cancelled_does_not_run(rig: Rig) -> None:
    held = rig.hold()
    calls = [rig.call(name) for name in "ab"]
    for name in "ab":
        rig.worker.cancel(name)
    assert [errors(call.result(20)) for call in calls] == [["EncodeError"]] * 2
    rig.runner.gate.set()
    held.result(20)
    assert errors(rig.worker.encode(batch(picture(3)))) == [None]
    assert sorted(rig.brightnesses) == [1, 2, 3]
    assert rig.worker.report().backlog_ms == 0


def test_the_deadline_of_one_is_not_that_of_the_others(rig: Rig) -> None:
    held = rig.hold()
    hasty, patient = rig.call("a", timeout_s=5.0), rig.call("b", timeout_s=60.0)
    rig.clock.now += 10
    rig.runner.gate.set()
    assert errors(hasty.result(20)) == ["DeadlineError"]
    assert errors(patient.result(20)) == [None]
    held.result(20)


def test_work_past_every_deadline_does_not_run(rig: Rig) -> None:
    held = rig.hold()
    calls = [rig.call(name, timeout_s=5.0) for name in "ab"]
    rig.clock.now += 10
    rig.runner.gate.set()
    assert [errors(call.result(20)) for call in calls] == [["DeadlineError"]] * 2
    held.result(20)
    assert sorted(rig.brightnesses) == [1, 2]


def test_a_full_queue_refuses_new_items_and_still_answers_known_ones() -> None:
    rig = Rig(max_queue_ms=10.0)
    rig.worker.encode(batch(PICTURE))
    until(lambda: rig.stats.num_entries == 1)
    rig.runner.gate.clear()
    busy = rig.callers.submit(rig.worker.encode, batch(picture(1, width=300), call_id="busy"))
    until(lambda: rig.worker.report().backlog_ms > 0)
    assert errors(rig.worker.encode(batch(picture(9), PICTURE, picture(9)))) == [
        "PoolSaturatedError", None, "PoolSaturatedError",
    ]  # fmt: skip
    rig.runner.gate.set()
    assert errors(busy.result(20)) == [None]
    rig.worker.close()
    rig.callers.shutdown()


def test_one_scope_never_hits_what_another_put_there(rig: Rig) -> None:
    for scope, cached in [("a", False), ("b", False), ("a", True), ("", False)]:
        result = rig.call("x", scope=scope).result(20)
        assert result.items[0].cached is cached
        until(lambda: rig.stats.num_entries == rig.stats.misses)
    assert rig.brightnesses == [7, 7, 7]


def test_an_item_without_a_scope_is_encoded_anew_and_not_kept(rig: Rig) -> None:
    for _ in range(2):
        assert not rig.call("x", scope=None).result(20).items[0].cached
    assert rig.brightnesses == [7, 7]
    assert rig.stats.num_entries == rig.stats.misses == 0


def test_a_draining_worker_answers_nothing_from_the_cache(rig: Rig) -> None:
    rig.worker.encode(batch(PICTURE))
    until(lambda: rig.stats.num_entries == 1)
    rig.worker.drain(10)
    assert errors(rig.worker.encode(batch(PICTURE))) == ["PoolClosedError"]


def test_a_worker_without_a_cache_runs_copies_apart() -> None:
    rig = Rig(cache_bytes=0)
    result = rig.worker.encode(batch(PICTURE, PICTURE))
    assert [answer.cached for answer in result.items] == [False, False]
    assert rig.brightnesses == [7, 7]
    assert rig.stats == CacheStats()
    rig.worker.close()
    rig.callers.shutdown()


def test_a_waiter_that_joins_as_the_work_is_given_up_gets_work_of_its_own() -> None:
    clock = Clock()
    flights = Flights(EmbeddingCache(1000), now_s=clock)
    shape = item(0, PICTURE).shape
    begun: list[Job] = []

    def begin(work: Job) -> None:
        begun.append(work)

    hasty, late = Job(cost_ms=1, deadline_s=clock.now + 1), Job(cost_ms=1)
    flights.enter(b"k", shape, hasty, begin)
    clock.now += 2
    flights.enter(b"k", shape, late, begin)
    begun[0].fail(DeadlineError("it was taken as overdue just before"))
    assert isinstance(hasty.error, DeadlineError)
    assert not late.settled
    begun[1].complete([torch.zeros(shape.num_tokens, 4)])
    assert late.error is None
    assert late.settled


def test_tokens_that_cannot_be_kept_are_said_so_and_computed_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def put(*_: object, **__: object) -> None:
        raise MemoryError("boom")

    monkeypatch.setattr(EmbeddingCache, "put", put)
    for _ in range(2):
        assert errors(rig.worker.encode(batch(PICTURE))) == [None]
        until(lambda: not rig.worker._intake._flights._flights)  # type: ignore[union-attr]
    assert rig.brightnesses == [7, 7]
    assert caplog.text.count("could not keep an item of 2 tokens") == 2


def test_work_may_run_as_late_as_the_most_patient_caller_allows() -> None:
    flights, shape = Flights(EmbeddingCache(1000)), item(0, PICTURE).shape
    begun: list[Job] = []
    waiters = [Job(cost_ms=1, deadline_s=deadline_s) for deadline_s in (5.0, 9.0, 7.0, None)]
    found = []
    for waiter in waiters:
        flights.enter(b"k", shape, waiter, begun.append)
        found.append(begun[0].deadline_s)
    flights.leave(b"k", waiters[3])
    flights.leave(b"k", waiters[1])
    assert found == [5.0, 9.0, 9.0, None]
    assert begun[0].deadline_s == 7.0
    assert len(begun) == 1


def test_items_of_the_same_bytes_and_another_shape_run_apart() -> None:
    flights = Flights(EmbeddingCache(1000))
    begun: list[Job] = []
    waiters = [Job(cost_ms=1), Job(cost_ms=1)]
    for waiter, width in zip(waiters, (100, 300), strict=True):
        flights.enter(b"k", item(0, picture(7, width=width)).shape, waiter, begun.append)
    assert len(begun) == 2
    begun[1].fail(EncodeError("it has another shape than was promised"))
    assert [waiter.settled for waiter in waiters] == [False, True]


def test_a_waiter_that_is_cancelled_just_before_it_joins_keeps_no_work_going() -> None:
    flights = Flights(EmbeddingCache(1000))
    shape = item(0, PICTURE).shape
    begun: list[Job] = []
    gone, other = Job(cost_ms=1), Job(cost_ms=1)
    gone.fail(EncodeError("its caller cancelled it"))
    flights.enter(b"k", shape, gone, begun.append)
    assert begun[0].settled
    flights.enter(b"k", shape, other, begun.append)
    begun[1].complete([torch.zeros(shape.num_tokens, 4)])
    assert other.error is None
    assert other.settled


def test_many_callers_of_few_pictures_all_get_their_own(rig: Rig) -> None:
    barrier = threading.Barrier(8)

    def work(number: int) -> list[float]:
        barrier.wait(20)
        got = []
        for step in range(40):
            which = (number * 7 + step * 3) % 5
            result = rig.worker.encode(batch(picture(which), call_id=f"{number}/{step}"))
            got.append(result.tokens_TE[0, 0] - which)
        return got

    with ThreadPoolExecutor(8) as threads:
        assert all(set(got) == {0.0} for got in threads.map(work, range(8)))
    assert sorted(rig.brightnesses) == [0, 1, 2, 3, 4]
    assert rig.stats.hits + rig.stats.joins == 8 * 40 - 5
