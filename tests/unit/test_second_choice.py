"""Whenever there is a second worker, what the first one refuses or takes along when it dies goes there at once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
from fake_pool import PICTURES, FakePool, client, encoded
from fakes import report

from cluster.streams.calls import FULL_RETRY_MS
from cluster.streams.items import Item
from cluster.streams.outcomes import Outcome
from cluster.streams.stream import Stream
from cluster.streams.transport import WorkerAway, WorkerGone
from encoder.errors import PoolClosedError, PoolSaturatedError, WorkerLostError
from workers.messages import EncodeBatch, EncodeResult, ErrorNote

FIRST_FAULTS = {
    "full": PoolSaturatedError("retry in 50 ms"),
    "draining": PoolClosedError("w is draining"),
    "died with it": WorkerGone("killed"),
    "gave it up": WorkerLostError("w is broken"),
    "away": WorkerAway("The actor is restarting"),
}


def stepped(pool: FakePool, pictures: Sequence[bytes], **changes: Any) -> tuple[Stream, list[Outcome]]:
    """A stream with these items that must never wait for anything but a call, and what has ended of it."""
    ended: list[Outcome] = []

    def sleep(seconds: float) -> None:
        raise AssertionError(f"it waits for {seconds:.3f} s")

    one = client(pool, **changes)
    stream = Stream(one, sleep=sleep)
    for source in pictures:
        read, header, shape = one.read(source)
        stream.add(
            Item(source=source, encoded=read, shape=shape, note=header.note, read_s=time.monotonic(), timeout_s=None,
                 on_end=ended.append)
        )  # fmt: skip
    return stream, ended


@pytest.mark.parametrize("second", ["holds the graph", "eager"])
@pytest.mark.parametrize("fault", FIRST_FAULTS)
def test_an_item_that_its_worker_refuses_or_that_dies_with_it_goes_to_the_other_at_once(
    fault: str, second: str
) -> None:
    pool = FakePool("ab")
    if second == "eager":
        pool.router.register(report("b", incarnation="b/1", graphs=(), max_queue_ms=pool.max_queue_ms))

    def answer(worker_id: str, batch: EncodeBatch) -> EncodeResult:
        if len(pool.log) > 1:
            return encoded(worker_id, batch)
        error = FIRST_FAULTS[fault]
        if fault in ("full", "draining"):  # told of the item
            return encoded(worker_id, batch, failing={0: ErrorNote.of(error)})
        raise error

    pool.answer = answer
    stream, ended = stepped(pool, PICTURES[:1])
    while not ended:
        stream.step(more=False, wait=True)
    assert [outcome.error for outcome in ended] == [None]
    (first, _), (other, _) = pool.log
    assert {first, other} == {"a", "b"}
    assert pool.in_flight_ms() == 0


def test_it_does_not_wait_for_a_full_call_there() -> None:
    """Others are under way, and more come soon: what comes for the first time would wait for them."""
    pool = FakePool("ab")
    pool.answer = lambda worker_id, batch: encoded(
        worker_id, batch, failing={} if len(pool.log) > 2 else {0: ErrorNote.of(FIRST_FAULTS["full"])}
    )
    stream, ended = stepped(pool, PICTURES[:8])
    stream.step(more=True, wait=False)
    assert [number for _, number in pool.log] == [4, 4]
    assert len(ended) == 3
    stream.step(more=True, wait=False)
    assert [number for _, number in pool.log] == [4, 4, 1]


def test_whom_two_workers_turn_away_waits_before_it_begins_anew() -> None:
    pool = FakePool("abc")
    pool.answer = lambda worker_id, batch: encoded(
        worker_id, batch, failing={} if len(pool.log) > 4 else {0: ErrorNote.of(FIRST_FAULTS["full"])}
    )
    one, started_s = client(pool), time.monotonic()
    assert one.encode(PICTURES[0]).tokens is not None
    assert time.monotonic() - started_s > 2 * FULL_RETRY_MS / 1e3
    workers = [name for name, _ in pool.log]
    assert len(workers) == 5
    assert workers[0] != workers[1]
    assert workers[2] != workers[3]


def test_the_only_worker_is_asked_again_after_a_pause_and_given_up_as_full() -> None:
    pool = FakePool("a")
    pool.answer = lambda worker_id, batch: encoded(worker_id, batch, failing={0: ErrorNote.of(FIRST_FAULTS["full"])})
    with pytest.raises(PoolSaturatedError, match="retry in 50 ms"):
        client(pool, saturated_timeout_s=0.2).encode(PICTURES[0])
    assert 3 <= len(pool.log) <= 6


def test_what_was_on_a_dead_worker_is_tried_one_after_the_other_without_pauses() -> None:
    pool = FakePool("ab")

    def answer(worker_id: str, batch: EncodeBatch) -> EncodeResult:
        for _ in fault:
            raise WorkerGone("killed")
        return encoded(worker_id, batch)

    fault, pool.answer = iter([True]), answer
    stream, ended = stepped(pool, PICTURES[:8])
    while len(ended) < 8:
        stream.step(more=False, wait=True)
    assert [number for _, number in pool.log] == [4, 4, 1, 1, 1, 1]
    assert len({name for name, _ in pool.log[2:]}) == 1
