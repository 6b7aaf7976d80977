"""The client: outcomes in order, each item once, whatever the workers do. Without Ray."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_pool import PICTURES, FakePool, client, encoded, retrying_soon
from fakes import Clock
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.client import Client
from cluster.planning.traces import read_trace
from cluster.routing.leases import Lease, LeaseRequest
from cluster.streams import leasing
from cluster.streams import stream as stream_module
from cluster.streams.items import Item
from cluster.streams.outcomes import Outcome
from cluster.streams.sources import Source
from cluster.streams.stream import Stream
from cluster.streams.transport import WorkerAway, WorkerGone
from encoder.errors import (
    BadMediaError,
    ConfigError,
    DeadlineError,
    EncodeError,
    EncoderPoolError,
    MediaTooLargeError,
    PoisonItemError,
    PoolClosedError,
    PoolSaturatedError,
    WorkerLostError,
)
from workers.messages import EncodeBatch, EncodeResult, ErrorNote
from workers.priority import Priority
from workers.samples import Distribution


def check(pictures: Sequence[bytes], outcomes: Iterator[Any]) -> None:
    """Each embedding is that of its own source, in order."""
    count = 0
    for source, outcome in zip(pictures, outcomes, strict=True):
        assert outcome.source is source
        assert outcome.error is None, outcome.error
        assert outcome.embedding.tokens.unique().tolist() == [len(source)]
        assert len(outcome.embedding.tokens) == outcome.embedding.shape.num_tokens
        count += 1
    assert count == len(pictures)


def test_outcomes_come_in_the_order_of_the_sources() -> None:
    pool = FakePool()
    check(PICTURES, client(pool).encode_many(PICTURES))
    assert {name for name, _ in pool.log} == {"a", "b"}
    assert max(number for _, number in pool.log) == 4
    assert pool.max_calls_each == 2
    assert pool.in_flight_ms() == 0


def test_an_embedding_has_memory_of_its_own() -> None:
    """What Ray hands out is read-only, and shared by all items of a call."""
    pool = FakePool("a")
    results: list[EncodeResult] = []

    def answer(worker_id: str, batch: EncodeBatch) -> EncodeResult:
        results.append(encoded(worker_id, batch))
        return results[-1]

    pool.answer = answer
    embedding = client(pool).encode(PICTURES[0])
    assert not np.shares_memory(embedding.tokens.numpy(), results[0].tokens_TE)


def test_a_path_and_its_bytes_give_the_same(tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    path.write_bytes(PICTURES[3])
    encoder = client(FakePool())
    by_path, by_bytes = encoder.encode(path), encoder.encode(PICTURES[3])
    assert by_path.tokens.equal(by_bytes.tokens)
    assert by_path.timings.keys() == {"replay", "call", "total"}
    assert encoder.encode(str(path)).shape == encoder.encode(bytearray(PICTURES[3])).shape == by_path.shape


def test_a_bad_source_is_an_outcome_of_its_own(tmp_path: Path) -> None:
    sources: list[Source] = [PICTURES[0], b"no picture", tmp_path / "none.png", tmp_path, b"x" * 10_001, PICTURES[1]]
    kinds = [type(outcome.error) for outcome in client(FakePool()).encode_many(sources)]
    assert kinds == [
        type(None), BadMediaError, BadMediaError, BadMediaError, MediaTooLargeError, type(None),
    ]  # fmt: skip
    with pytest.raises(BadMediaError, match=r"none\.png cannot be read: No such file"):
        client(FakePool()).encode(tmp_path / "none.png")


@pytest.mark.timeout(20)
def test_what_is_neither_a_file_nor_bytes_is_an_outcome_too(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")  # nobody ever writes to it
    released = memoryview(PICTURES[0])
    released.release()
    sources: list[Any] = [PICTURES[0], None, 5, tmp_path / "pipe.png", "/dev/zero", "a\0b", released, PICTURES[1]]
    outcomes = list(client(FakePool()).encode_many(sources))
    assert [type(outcome.error) for outcome in outcomes] == [type(None), *[BadMediaError] * 6, type(None)]
    assert "a source is a path or a file's bytes, got nothing" in str(outcomes[1].error)
    assert "got an int" in str(outcomes[2].error)


def test_a_priority_that_there_is_not_is_refused_by_the_names_of_those_there_are() -> None:
    with pytest.raises(ConfigError, match="no priority 'high': it is 'interactive' or 'batch'"):
        client(FakePool()).encode(PICTURES[0], priority="high")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"timeout_s": "5"}, "timeout_s is a number of seconds or None, got a str '5'"),
        ({"timeout_s": float("nan")}, "timeout_s is a number of seconds or None, got a float nan"),
        ({"timeout_s": 10**400}, "timeout_s is a number of seconds or None, got an int 10"),
        ({"scope": 5}, "a scope is a name or None, got an int"),
        ({"scope": "\ud800"}, "is no text: surrogates not allowed"),
    ],
)
def test_options_that_are_none_are_refused_at_once(options: dict[str, Any], message: str) -> None:
    sources = iter(PICTURES[:2])
    with pytest.raises(ConfigError, match=message):
        client(FakePool()).encode_many(sources, **options)
    assert len(list(sources)) == 2
    assert client(FakePool()).encode(PICTURES[0], timeout_s=float("inf")).shape


@pytest.mark.timeout(20)
def test_nothing_is_waited_for_where_nothing_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "LONGEST_WAIT_S", 60.0)

    def broken() -> Iterator[bytes]:
        raise LookupError("no first picture")
        yield b""

    assert list(client(FakePool()).encode_many([])) == []
    assert [type(outcome.error) for outcome in client(FakePool()).encode_many([b"no picture"])] == [BadMediaError]
    with pytest.raises(LookupError, match="no first picture"):
        list(client(FakePool()).encode_many(broken()))


def test_what_was_read_before_the_sources_raised_comes_out_first() -> None:
    def sources() -> Iterator[bytes]:
        yield from PICTURES[:9]
        raise LookupError("no tenth picture")

    pool = FakePool()
    stream = client(pool).encode_many(sources())
    check(PICTURES[:9], itertools.islice(stream, 9))
    with pytest.raises(LookupError, match="no tenth picture"):
        next(stream)
    assert pool.in_flight_ms() == 0


def test_an_error_from_the_worker_keeps_its_type_and_its_neighbours() -> None:
    pool = FakePool()
    note = ErrorNote(name="BadMediaError", message="truncated")
    pool.answer = lambda worker_id, batch: encoded(worker_id, batch, failing={0: note})
    outcomes = list(client(pool, items_per_call=16).encode_many(PICTURES[:3]))
    assert [type(outcome.error) for outcome in outcomes].count(BadMediaError) == len(pool.log)


def test_only_a_window_of_items_is_read_ahead() -> None:
    read = []

    def sources() -> Iterator[bytes]:
        for number, source in enumerate(PICTURES):
            read.append(number)
            yield source

    stream = client(FakePool(), max_in_flight_items=6).encode_many(sources())
    for number, _ in enumerate(stream):
        assert len(read) <= number + 7


def test_only_a_window_of_bytes_is_held() -> None:
    pool = FakePool()
    read: list[int] = []
    answered: list[int] = []

    def sources() -> Iterator[bytes]:
        for number in range(20):
            read.append(number)
            yield PICTURES[0]

    def answer(worker_id: str, batch: EncodeBatch) -> EncodeResult:
        assert len(read) - len(answered) <= 3
        answered.extend(range(len(batch.items)))
        return encoded(worker_id, batch)

    pool.answer = answer
    encoder = client(pool, max_in_flight_bytes=len(PICTURES[0]) * 3, items_per_call=2)
    check([PICTURES[0]] * 20, encoder.encode_many(sources()))


def test_closing_early_cancels_calls_and_returns_leases() -> None:
    pool = FakePool()
    pool.newest_first = False
    stream = client(pool).encode_many(itertools.cycle(PICTURES))
    next(stream)
    assert pool.calls
    waiting = {batch.call_id for _, _, batch in pool.calls.values()}
    stream.close()
    assert set(pool.cancelled) == waiting
    sent = sum(len(batch.items) for _, _, batch in pool.calls.values())
    assert sum(member.num_leases for member in pool.router.members()) == sent


def test_items_of_a_dead_worker_go_elsewhere() -> None:
    pool = FakePool()

    def die_once(worker_id: str, batch: EncodeBatch) -> EncodeResult:
        if worker_id == "a":
            pool.incarnations["a"] += 1  # and does not come back
            raise WorkerGone("killed")
        return encoded(worker_id, batch)

    pool.answer = die_once
    check(PICTURES, client(pool).encode_many(PICTURES))


def test_a_poison_item_fails_alone_and_is_refused_from_then_on() -> None:
    pool = FakePool("abc")
    poison = PICTURES[5]

    def answer(worker_id: str, batch: EncodeBatch) -> EncodeResult:
        if any(item.encoded.tobytes() == poison for item in batch.items):
            pool.restart(worker_id)
            raise WorkerGone("segmentation fault")
        return encoded(worker_id, batch)

    pool.answer = answer
    encoder = client(pool)
    outcomes = list(encoder.encode_many(PICTURES))
    assert [number for number, outcome in enumerate(outcomes) if outcome.error] == [5]
    assert isinstance(outcomes[5].error, PoisonItemError)
    num_calls = len(pool.log)
    with pytest.raises(PoisonItemError, match="quarantined"):
        encoder.encode(poison)
    assert len(pool.log) == num_calls


def test_an_item_that_was_on_a_dying_worker_goes_in_a_call_of_its_own() -> None:
    pool = FakePool("abc")
    died: set[bytes] = set()

    def answer(worker_id: str, batch: EncodeBatch) -> EncodeResult:
        contents = {item.encoded.tobytes() for item in batch.items}
        assert not contents & died or len(batch.items) == 1
        if worker_id == "a" and not contents & died:  # what it takes along waits, with others, until b or c is free
            died.update(contents)
            pool.restart(worker_id)
            raise WorkerGone("killed")
        return encoded(worker_id, batch)

    pool.answer = answer
    pool.newest_first = False
    check(PICTURES, client(pool, items_per_call=2).encode_many(PICTURES))
    assert len(died) > 1


def test_items_that_a_draining_worker_refuses_do_not_come_to_it_again() -> None:
    pool = FakePool()
    came: list[bytes] = []

    def answer(worker_id: str, batch: EncodeBatch) -> EncodeResult:
        if worker_id == "b":
            return encoded(worker_id, batch)
        came.extend(item.encoded.tobytes() for item in batch.items)
        drains = ErrorNote(name="PoolClosedError", message="the worker is draining")
        return encoded(worker_id, batch, failing=dict.fromkeys(range(len(batch.items)), drains))

    pool.answer = answer
    check(PICTURES, client(pool).encode_many(PICTURES))
    assert came
    assert len(came) == len(set(came))


def test_a_call_that_is_never_answered_is_cancelled_and_its_items_go_elsewhere() -> None:
    pool = FakePool()
    pool.wait = lambda calls, timeout_s: [call for call in calls if pool.calls[call][0] != "a"][:1]  # type: ignore[method-assign]
    check(PICTURES[:8], client(pool, call_timeout_s=0.05).encode_many(PICTURES[:8]))
    hung = {batch.call_id for _, _, batch in pool.calls.values()}
    assert hung
    assert hung <= set(pool.cancelled)


def test_a_worker_that_answers_one_call_after_the_other_is_not_dead_for_the_last_one() -> None:
    pool = FakePool("a")
    pool.newest_first = False

    def answer(worker_id: str, batch: EncodeBatch) -> EncodeResult:
        time.sleep(0.1)  # large pictures, and few threads that decode them
        return encoded(worker_id, batch)

    pool.answer = answer
    one = client(pool, items_per_call=1, calls_per_worker=8, call_timeout_s=0.4)
    check(PICTURES[:8], one.encode_many(PICTURES[:8]))
    assert pool.log == [("a", 1)] * 8  # none came twice


def test_an_item_that_is_refused_may_wait_while_others_of_its_stream_get_on() -> None:
    pool = FakePool("a")
    done: list[int] = []

    def answer(worker_id: str, batch: EncodeBatch) -> EncodeResult:
        is_large = batch.items[0].encoded.nbytes == len(PICTURES[0])
        if is_large and len(done) < 10:
            return encoded(worker_id, batch, failing={0: ErrorNote(name="PoolSaturatedError", message="full")})
        time.sleep(0.02)
        done.append(1)
        return encoded(worker_id, batch)

    pool.answer = answer
    pool.newest_first = False
    encoder = client(pool, items_per_call=1, calls_per_worker=1, saturated_timeout_s=0.1)
    check(PICTURES[:11], encoder.encode_many(PICTURES[:11]))


def test_deaths_of_one_item_s_trials_do_not_excuse_another() -> None:
    pool = FakePool("abc")

    def answer(worker_id: str, batch: EncodeBatch) -> EncodeResult:
        pool.restart(worker_id)
        raise WorkerGone("segmentation fault")

    pool.answer = answer
    encoder = client(pool)
    num_calls = []
    for poison in PICTURES[:2]:
        before = len(pool.log)
        with pytest.raises(PoisonItemError):
            encoder.encode(poison)
        num_calls.append(len(pool.log) - before)
    assert num_calls == [2, 3], "the second's doubt is the death of the worker that the first was on before its trial"


def test_a_worker_that_was_never_reached_blames_nobody() -> None:
    pool = FakePool("ab")
    away = iter(range(12))

    def answer(worker_id: str, batch: EncodeBatch) -> EncodeResult:
        for _ in away:
            pool.restart(worker_id)
            raise WorkerAway("ActorUnavailableError: The actor is restarting.")
        return encoded(worker_id, batch)

    pool.answer = answer
    check(PICTURES[:8], client(pool).encode_many(PICTURES[:8]))


def test_copies_of_a_poison_item_do_not_kill_on() -> None:
    pool = FakePool("ab")

    def answer(worker_id: str, batch: EncodeBatch) -> EncodeResult:
        if any(item.encoded.tobytes() == PICTURES[5] for item in batch.items):
            pool.restart(worker_id)
            raise WorkerGone("segmentation fault")
        return encoded(worker_id, batch)

    pool.answer = answer
    outcomes = list(client(pool).encode_many([PICTURES[0], *[PICTURES[5]] * 40, PICTURES[1]]))
    assert [type(outcome.error) for outcome in outcomes] == [type(None), *[PoisonItemError] * 40, type(None)]
    assert sum(pool.incarnations.values()) < 20  # 80 without


def test_two_suspects_of_different_streams_never_meet_on_a_worker() -> None:
    pool = FakePool("a")
    encoder = client(pool)
    is_through = threading.Event()

    def pass_through() -> None:
        is_through.set()
        encoder.trials.end("a")

    def answer(worker_id: str, batch: EncodeBatch) -> EncodeResult:
        if pool.incarnations["a"] == 1:
            pool.restart("a")
            assert encoder.trials.begin("a")  # another stream was quicker
            threading.Timer(0.12, pass_through).start()
            raise WorkerGone("killed")
        assert is_through.is_set()
        return encoded(worker_id, batch)

    pool.answer = answer
    assert encoder.encode(PICTURES[0]).worker == "a"
    assert pool.num_asked == 2  # no lease in vain
    assert encoder.trials.begin("a")
    assert pool.in_flight_ms() == 0


def test_a_call_that_fails_as_a_whole_fails_its_items_and_no_others() -> None:
    pool = FakePool()
    fault = iter([EncodeError("a bug")])

    def answer(worker_id: str, batch: EncodeBatch) -> EncodeResult:
        for error in fault:
            raise error
        return encoded(worker_id, batch)

    pool.answer = answer
    outcomes = list(client(pool).encode_many(PICTURES))
    assert [type(outcome.error) for outcome in outcomes].count(EncodeError) == 4


def test_a_pool_without_workers_fails_after_a_bounded_time() -> None:
    pool = FakePool("")
    with pytest.raises(WorkerLostError, match="no worker is up"):
        client(pool, recovery_timeout_s=0.2).encode(PICTURES[0])


def test_who_waits_for_a_worker_hears_of_it_once_each_time_that_none_is_left(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leasing, "NOTICE_S", 0.05)
    told = "no worker is up that may take it; trying again for 0.5 s at most"
    list(client(FakePool(""), recovery_timeout_s=0.5).encode_many(PICTURES))
    assert caplog.messages == [told]

    pool = FakePool("")

    def sources() -> Iterator[Source]:
        yield PICTURES[0]
        pool.incarnations["a"] = 0
        pool.restart("a")
        yield PICTURES[1]
        pool.router.forget("a")
        yield PICTURES[2]

    outcomes = client(pool, recovery_timeout_s=0.5, max_in_flight_items=1).encode_many(sources())
    assert [outcome.error is None for outcome in outcomes] == [False, True, False]
    assert caplog.messages == [told] * 3


def test_who_waits_for_a_worker_but_a_moment_hears_nothing(caplog: pytest.LogCaptureFixture) -> None:
    list(client(FakePool(""), recovery_timeout_s=0.5).encode_many(PICTURES[:2]))
    assert caplog.messages == []


def test_items_that_nobody_takes_fail_together_not_one_after_the_other() -> None:
    started_s = time.monotonic()
    outcomes = list(client(FakePool(""), recovery_timeout_s=0.2).encode_many(PICTURES))
    assert {type(outcome.error) for outcome in outcomes} == {WorkerLostError}
    assert time.monotonic() - started_s < 2  # thirty of them, that would be six seconds


def test_a_full_pool_is_retried_and_then_refused_with_the_hint() -> None:
    pool = FakePool("a", max_queue_ms=50)
    request = LeaseRequest(shape=fake_shape(PICTURES[29]))
    others = pool.router.assign([request] * 100, priority=Priority.INTERACTIVE)
    with pytest.raises(PoolSaturatedError, match=r"all 1 workers are full; retry in \d+ ms"):
        client(pool, saturated_timeout_s=0.1).encode(PICTURES[29])
    pool.router.release([lease.lease_id for lease in others if isinstance(lease, Lease)])
    assert client(pool).encode(PICTURES[29]).worker == "a"


def test_what_a_full_pool_refuses_comes_back_a_call_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = FakePool("a", max_queue_ms=1)
    request = LeaseRequest(shape=fake_shape(PICTURES[0]))
    (other,) = pool.router.assign([request], priority=Priority.INTERACTIVE)
    assert isinstance(other, Lease)
    clock = Clock(time.monotonic())
    monkeypatch.setattr(leasing, "time", SimpleNamespace(monotonic=clock))
    one = client(pool, items_per_call=4, calls_per_worker=8)
    stream = Stream(one)
    encoded, header, shape = one.read(PICTURES[0])
    for _ in range(32):
        stream.add(
            Item(source=PICTURES[0], encoded=encoded, shape=shape, note=header.note, read_s=0.0, timeout_s=None,
                 on_end=lambda outcome: None)
        )  # fmt: skip
    asked = []
    for _ in range(20):
        before = pool.num_asked
        stream.step(more=False, wait=False)
        asked.append(pool.num_asked - before)
        clock.now += 0.0101  # MIN_RETRY_S, and a little
    assert asked[:4] == [32, 4, 8, 8]
    assert max(asked[1:]) <= 16
    pool.router.release([other.lease_id])
    stream.step(more=False, wait=False)
    assert pool.log == [("a", 1)]


def test_a_worker_that_refuses_is_asked_again() -> None:
    pool = FakePool()
    note = ErrorNote(name="PoolSaturatedError", message="retry in 20 ms")
    refusals = iter([{0: note, 1: note}, {0: note}])
    pool.answer = lambda worker_id, batch: encoded(worker_id, batch, failing=next(refusals, {}))
    check(PICTURES, client(pool).encode_many(PICTURES))


def test_items_that_wait_behind_their_own_stream_are_not_refused() -> None:
    pool = FakePool("a", max_queue_ms=1)  # one item at a time

    def answer(worker_id: str, batch: EncodeBatch) -> EncodeResult:
        time.sleep(0.02)
        return encoded(worker_id, batch)

    pool.answer = answer
    check(PICTURES[:20], client(pool, saturated_timeout_s=0.1).encode_many(PICTURES[:20]))


def test_a_caller_that_pauses_does_not_wear_out_the_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.streams.stream.MAX_RETRY_S", 0.05)
    pool = FakePool("a")
    note = ErrorNote(name="PoolSaturatedError", message="retry in 1 ms")
    refusals = iter([{0: note}, {0: note}])

    def answer(worker_id: str, batch: EncodeBatch) -> EncodeResult:
        is_second = batch.items[0].encoded.tobytes() == PICTURES[1]
        return encoded(worker_id, batch, failing=next(refusals, {}) if is_second else {})

    pool.answer = answer
    stream = client(pool, saturated_timeout_s=0.2, items_per_call=1).encode_many(PICTURES[:2])
    assert next(stream).error is None
    time.sleep(0.4)
    assert next(stream).error is None


@pytest.mark.timeout(20)
def test_a_worker_that_refuses_for_ever_is_given_up() -> None:
    pool = FakePool()
    note = ErrorNote(name="PoolSaturatedError", message="retry in 1 ms")
    pool.answer = lambda worker_id, batch: encoded(worker_id, batch, failing=dict.fromkeys(range(4), note))
    outcomes = list(client(pool, saturated_timeout_s=0.2).encode_many(PICTURES[:12]))
    assert {type(outcome.error) for outcome in outcomes} == {PoolSaturatedError}


def test_a_call_that_finds_no_room_on_its_way_goes_later() -> None:
    pool = FakePool()
    start, faults = pool.start, iter([True, False, True])

    def full(worker_id: str, batch: EncodeBatch) -> Any:
        if next(faults, False):
            raise PoolSaturatedError("the object store is full")
        return start(worker_id, batch)

    pool.start = full  # type: ignore[method-assign]
    check(PICTURES, client(pool).encode_many(PICTURES))
    assert pool.in_flight_ms() == 0


def test_a_deadline_reaches_items_that_wait_for_a_lease() -> None:
    with pytest.raises(DeadlineError, match=r"deadline of 0\.05 s"):
        client(FakePool("")).encode(PICTURES[0], timeout_s=0.05)


def test_a_closed_pool_says_so() -> None:
    encoder = client(FakePool())
    stream = encoder.encode_many(PICTURES)
    next(stream)
    encoder.closed = True
    with pytest.raises(PoolClosedError):
        list(stream)
    with pytest.raises(PoolClosedError):
        encoder.encode(PICTURES[0])


@settings(max_examples=60, deadline=None)
@given(faults=st.lists(st.sampled_from(["ok", "ok", "die", "refuse", "lost", "closed"]), max_size=25))
def test_every_item_ends_in_exactly_one_outcome(faults: list[str]) -> None:
    pool = FakePool("abc")
    script = iter(faults)

    def answer(worker_id: str, batch: EncodeBatch) -> EncodeResult:
        fault = next(script, "ok")
        if fault == "die":
            pool.restart(worker_id)
            raise WorkerGone("killed")
        if fault == "lost":
            pool.restart(worker_id)
            raise WorkerLostError("w is starting")
        if fault == "closed":
            pool.restart(worker_id)
        names = {"refuse": "PoolSaturatedError", "closed": "PoolClosedError"}
        note = ErrorNote(name=names.get(fault, ""), message="retry in 1 ms")
        return encoded(worker_id, batch, failing={0: note} if fault in names else {})

    pool.answer = answer
    with retrying_soon():
        outcomes = list(client(pool, recovery_timeout_s=2).encode_many(PICTURES[:14]))
    assert [outcome.source for outcome in outcomes] == PICTURES[:14]
    for outcome in outcomes:
        error: EncoderPoolError | None = outcome.error
        assert (outcome.embedding is None) != (error is None)
        assert error is None or isinstance(error, PoisonItemError | WorkerLostError)
    if "die" not in faults and not pool.num_lost_calls:  # a restart takes the worker's other calls along
        assert all(outcome.error is None for outcome in outcomes)


def fake_shape(encoded_picture: bytes) -> Any:
    from fakes import item

    return item(0, encoded_picture).shape


def test_a_trace_file_notes_what_was_encoded(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    sources = [PICTURES[0], b"no picture", PICTURES[1]]
    outcomes = list(client(FakePool(), trace_file=path).encode_many(sources))
    records = list(read_trace(path))
    encoded = [outcome.embedding for outcome in outcomes if outcome.embedding is not None]
    assert [record.grids for record in records] == [embedding.shape.grids for embedding in encoded]
    assert {(record.model, record.graphs, record.ms) for record in records} == {("fake", ("g",), 1.0)}


def opened(stream: Stream, one: Client, sources: Sequence[bytes]) -> tuple[list[Item], list[Outcome]]:
    """Items of a stream, and what becomes of them."""
    items, ended = [], list[Outcome]()
    for source in sources:
        encoded, header, shape = one.read(source)
        items.append(
            Item(
                source=source,
                encoded=encoded,
                shape=shape,
                note=header.note,
                read_s=time.monotonic(),
                timeout_s=None,
                priority=Priority.BATCH,
                on_end=ended.append,
            )
        )
        stream.add(items[-1])
    return items, ended


def one_sent_and_one_leased() -> tuple[FakePool, Client, Stream, list[Item], list[Outcome]]:
    """Calls of one item; a worker that has its one call, and another item leased for the next."""
    pool = FakePool("ab")
    pool.router.suspect("b/1")
    one = client(pool, items_per_call=1, calls_per_worker=1)
    stream = Stream(one)
    items, ended = opened(stream, one, PICTURES[:2])
    pool.wait = lambda calls, timeout_s: []  # type: ignore[method-assign]
    stream.step(more=False, wait=False)
    assert len(pool.log) == 1
    assert sum(member.num_leases for member in pool.router.members()) == 2
    return pool, one, stream, items, ended


def test_a_leased_item_that_is_cancelled_gives_its_lease_back() -> None:
    pool, _, stream, items, _ = one_sent_and_one_leased()
    stream.cancel(items[1:])
    assert sum(member.num_leases for member in pool.router.members()) == 1


def test_a_leased_item_whose_content_is_quarantined_meanwhile_gives_its_lease_back() -> None:
    pool, one, stream, items, ended = one_sent_and_one_leased()
    one.trials.quarantine(items[1].encoded)
    stream.step(more=False, wait=False)
    assert [type(outcome.error) for outcome in ended] == [PoisonItemError]
    assert sum(member.num_leases for member in pool.router.members()) == 1


def two_in_a_call(num_items: int) -> tuple[FakePool, Stream, list[Item], list[Outcome]]:
    """The first two of the items are at the one worker, which does not answer until `wait` is as it was."""
    pool = FakePool("a")
    one = client(pool, items_per_call=2, calls_per_worker=1)
    stream = Stream(one)
    items, ended = opened(stream, one, PICTURES[:num_items])
    pool.wait = lambda calls, timeout_s: []  # type: ignore[method-assign]
    stream.step(more=False, wait=False)
    return pool, stream, items, ended


def test_a_cancelled_item_is_not_sent_again_when_its_worker_dies() -> None:
    pool, stream, items, ended = two_in_a_call(2)
    stream.cancel(items[1:])
    pool.restart("a")
    del pool.wait  # type: ignore[method-assign]
    while not ended:
        stream.step(more=False, wait=True)
    assert [number for _, number in pool.log] == [2, 1]
    assert ended[0].source is PICTURES[0]


def test_cancelled_items_leave_no_lease_and_end_no_more() -> None:
    pool, stream, items, ended = two_in_a_call(6)
    stream.cancel([items[1], items[2], items[5], items[5]])
    assert pool.cancelled == [1]  # of the call only this item
    del pool.wait  # type: ignore[method-assign]
    while len(ended) < 3:
        stream.step(more=False, wait=True)
    assert [outcome.source for outcome in ended] == [PICTURES[0], PICTURES[3], PICTURES[4]]
    assert all(outcome.error is None for outcome in ended)
    assert stream.open_bytes == 0
    assert pool.in_flight_ms() == 0


def test_what_a_client_did_is_counted_and_told_at_every_step() -> None:
    pool = FakePool("ab")
    killed = iter([True])

    def answer(worker_id: str, batch: EncodeBatch) -> EncodeResult:
        if next(killed, False):
            pool.restart(worker_id)
            raise WorkerGone("killed")
        return encoded(worker_id, batch)

    pool.answer = answer
    ours = client(pool)
    told: list[int] = []
    ours.export = lambda: told.append(len(ours.meter.samples()))
    assert all(outcome.error is None for outcome in ours.encode_many(PICTURES[:6]))
    found = {(sample.name, *sample.labels): sample.value for sample in ours.meter.samples()}
    assert found["encpool_client_items_total", "client", "ok"] == 6
    assert isinstance(retries := found["encpool_retries_total", "client", "died"], float | int)
    assert retries >= 1
    for stage, least in {"probe": 6, "route": 2, "transfer": 2, "total": 6}.items():
        seen = found["encpool_stage_seconds", "client", stage]
        assert isinstance(seen, Distribution)
        assert seen.num_observations >= least
    assert told


def test_a_scope_travels_with_each_item() -> None:
    pool = FakePool("a")
    scopes: set[str] = set()

    def answer(worker_id: str, batch: EncodeBatch) -> EncodeResult:
        scopes.update(item.scope for item in batch.items)
        return encoded(worker_id, batch)

    pool.answer = answer
    list(client(pool).encode_many(PICTURES[:2], scope="tenant"))
    assert scopes == {"tenant"}
