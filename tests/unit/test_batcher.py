"""The worker's queue: bounded, fair, nothing lost, nothing twice."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from fakes import Clock, fake_adapter, until
from hypothesis import given, settings
from hypothesis import strategies as st

from encoder.adapters.base import Segment
from encoder.errors import DeadlineError, EncodeError, PoolClosedError, PoolSaturatedError, WorkerLostError
from encoder.packing import Replay
from encoder.types import SegmentShape
from workers.batcher import Batch, Batcher
from workers.job import Job

PIXELS = np.zeros((0, 3), np.uint8)


def segments(*rows: int) -> list[Segment]:
    return [Segment(shape=fake_adapter().measure((1, height, 10)), patches_PC=PIXELS) for height in rows]


def make_batcher(
    clock: Clock | None = None, *, max_queue_ms: float = 100.0, max_ready_patches: int = 10_000, **settings: Any
) -> Batcher:
    return Batcher(max_queue_ms=max_queue_ms, max_ready_patches=max_ready_patches, now_s=clock or Clock(), **settings)


def admitted(batcher: Batcher, cost_ms: float = 1.0, **about: Any) -> Job:
    job = Job(cost_ms=cost_ms, **about)
    job.on_settled = batcher.release
    batcher.admit(job)
    return job


def oldest(number: int):  # type: ignore[no-untyped-def]
    def plan(pending: Sequence[SegmentShape]) -> Replay:
        return Replay(key=None, taken=tuple(range(min(number, len(pending)))))

    return plan


def run(batch: Batch | None) -> None:
    assert batch is not None
    for entry in batch.entries:
        entry.job.deliver(entry.index, torch.zeros(1, 1))


def test_a_full_queue_refuses_with_a_hint() -> None:
    batcher = make_batcher(max_queue_ms=100)
    admitted(batcher, cost_ms=80)
    with pytest.raises(PoolSaturatedError, match=r"holds 80 ms of work and takes 100; retry in 10 ms"):
        admitted(batcher, cost_ms=30)
    admitted(batcher, cost_ms=20)


def test_an_empty_queue_takes_an_item_of_any_cost() -> None:
    batcher = make_batcher(max_queue_ms=100)
    job = admitted(batcher, cost_ms=500)
    batcher.push(job, segments(1))
    run(batcher.take(oldest(9), wait_s=0))
    assert batcher.backlog_ms == 0
    admitted(batcher, cost_ms=500)


def test_slices_of_one_image_may_run_in_different_replays() -> None:
    batcher = make_batcher()
    job = admitted(batcher)
    batcher.push(job, segments(1, 2, 3))
    run(batcher.take(oldest(2), wait_s=0))
    assert not job.settled
    run(batcher.take(oldest(2), wait_s=0))
    assert job.settled
    assert len(job.outputs) == 3


def test_what_a_replay_leaves_keeps_its_place() -> None:
    batcher = make_batcher()
    first, second = admitted(batcher), admitted(batcher)
    batcher.push(first, segments(1, 2, 3))
    batcher.push(second, segments(4))
    batch = batcher.take(lambda pending: Replay(key=None, taken=(0, 2)), wait_s=0)
    assert batch is not None
    rest = batcher.take(oldest(9), wait_s=0)
    assert rest is not None
    assert [entry.segment.shape.grid[1] for entry in rest.entries] == [2, 4]


def test_an_item_past_its_deadline_is_dropped_at_dequeue() -> None:
    clock = Clock()
    batcher = make_batcher(clock)
    late, other = admitted(batcher, deadline_s=clock() + 1), admitted(batcher)
    batcher.push(late, segments(1, 1))
    batcher.push(other, segments(2))
    clock.now += 2
    batch = batcher.take(oldest(9), wait_s=0)
    assert batch is not None
    assert [entry.job for entry in batch.entries] == [other]
    assert isinstance(late.error, DeadlineError)
    assert batcher.num_admitted == 1


def test_a_cancelled_item_costs_no_gpu_time() -> None:
    batcher = make_batcher()
    job = admitted(batcher)
    batcher.push(job, segments(1, 1))
    job.fail(EncodeError("its caller cancelled it"))
    assert batcher.take(oldest(9), wait_s=0) is None
    assert (batcher.num_waiting, batcher.backlog_ms) == (0, 0)


def test_an_item_that_is_cancelled_on_its_way_to_the_door_takes_no_room() -> None:
    batcher = make_batcher()
    job = Job(cost_ms=1.0, num_bytes=10)
    job.on_settled = batcher.release
    job.fail(EncodeError("its caller cancelled it"))
    batcher.admit(job)
    assert (batcher.num_admitted, batcher.backlog_ms, batcher.backlog_bytes) == (0, 0, 0)


def test_a_cancelled_item_is_not_decoded() -> None:
    batcher = make_batcher()
    gone, other = admitted(batcher), admitted(batcher)
    decoded: list[Job] = []
    for job in (gone, other):
        batcher.decode_later(job, lambda job=job: decoded.append(job))  # type: ignore[misc]
    gone.fail(EncodeError("its caller cancelled it"))
    decode_next(batcher)
    assert decoded == [other]


def test_what_is_dropped_at_dequeue_makes_room_for_decoding() -> None:
    batcher = make_batcher(max_ready_patches=10)
    gone, other = admitted(batcher), admitted(batcher)
    batcher.push(gone, segments(2))
    batcher.decode_later(other, lambda: batcher.push(other, segments(1)))
    thread = threading.Thread(target=decode_next, args=(batcher,), daemon=True)
    thread.start()
    thread.join(0.05)
    assert thread.is_alive(), "20 patches wait where 10 may"
    gone.fail(EncodeError("its caller cancelled it"))
    assert batcher.take(oldest(9), wait_s=0) is None
    thread.join(5)
    assert not thread.is_alive()
    run(batcher.take(oldest(9), wait_s=0))
    assert other.settled


def test_a_closed_queue_admits_nothing_and_finishes_what_it_has() -> None:
    batcher = make_batcher()
    job = admitted(batcher)
    batcher.push(job, segments(1))
    batcher.close()
    with pytest.raises(PoolClosedError):
        admitted(batcher)
    assert not batcher.wait_empty(0)
    run(batcher.take(oldest(1), wait_s=0))
    assert batcher.wait_empty(0)


def test_abort_settles_everything() -> None:
    batcher = make_batcher()
    decoded, undecoded = admitted(batcher), admitted(batcher)
    batcher.push(decoded, segments(1))
    batcher.abort(WorkerLostError("gone"))
    assert isinstance(decoded.error, WorkerLostError)
    assert isinstance(undecoded.error, WorkerLostError)
    batcher.push(undecoded, segments(1))
    assert batcher.take(oldest(1), wait_s=0) is None
    batcher.close()
    with pytest.raises(WorkerLostError, match="gone"):
        admitted(batcher)


def decode_next(batcher: Batcher) -> None:
    decode = batcher.next_decode()
    assert decode is not None
    decode()


def test_decoding_pauses_while_too_much_waits() -> None:
    batcher = make_batcher(max_ready_patches=10)
    for rows in (1, 2):
        job = admitted(batcher)
        batcher.decode_later(job, lambda job=job, rows=rows: batcher.push(job, segments(rows)))  # type: ignore[misc]
    decode_next(batcher)
    thread = threading.Thread(target=decode_next, args=(batcher,))
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    run(batcher.take(oldest(1), wait_s=0))
    thread.join(5)
    assert batcher.num_waiting == 1


def test_later_parts_of_a_clip_wait_for_room_and_its_last_segment_settles_it() -> None:
    batcher = make_batcher(max_ready_patches=10)
    job = admitted(batcher)
    batcher.push(job, segments(8, 8), num_segments=3)
    pushing = threading.Thread(target=batcher.push, args=(job, segments(4)), kwargs={"first": 2, "num_segments": 3})
    pushing.start()
    pushing.join(timeout=0.2)
    assert pushing.is_alive(), "16 patches wait where 10 may"
    run(batcher.take(oldest(2), wait_s=0))
    pushing.join(timeout=10)
    assert not pushing.is_alive()
    assert not job.settled
    run(batcher.take(oldest(1), wait_s=0))
    assert job.settled
    assert len(job.outputs) == 3


def test_a_clip_that_nobody_awaits_is_decoded_no_further() -> None:
    batcher = make_batcher(max_ready_patches=10)
    job = admitted(batcher)
    batcher.push(job, segments(16), num_segments=2)
    pushing = threading.Thread(target=batcher.push, args=(job, segments(4)), kwargs={"first": 1, "num_segments": 2})
    pushing.start()
    job.fail(EncodeError("cancelled"))
    pushing.join(timeout=10)
    assert not pushing.is_alive()
    assert batcher.num_waiting == 1, "only the part before it"


def test_a_decoding_thread_ends_with_the_queue() -> None:
    batcher = make_batcher()
    thread = threading.Thread(target=batcher.next_decode)
    thread.start()
    batcher.abort(WorkerLostError("gone"))
    thread.join(5)
    assert not thread.is_alive()


def test_an_item_wakes_one_decoding_thread_and_not_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    batcher = make_batcher()
    looks = []
    pop = batcher._undecoded.pop
    monkeypatch.setattr(batcher._undecoded, "pop", lambda among: looks.append(1) or pop(among))

    def decode_for_ever() -> None:
        while (decode := batcher.next_decode()) is not None:
            decode()

    threads = [threading.Thread(target=decode_for_ever, daemon=True) for _ in range(8)]
    for thread in threads:
        thread.start()
    until(lambda: len(looks) == 8)
    job = admitted(batcher)
    batcher.decode_later(job, lambda: batcher.push(job, segments(4)))
    run(batcher.take(oldest(1), wait_s=5))
    assert job.settled
    until(lambda: len(looks) == 10)  # it took the item, then looked again
    batcher.abort(WorkerLostError("gone"))
    for thread in threads:
        thread.join(5)
    assert len(looks) == 10


def test_take_wakes_up_when_a_segment_arrives() -> None:
    batcher = make_batcher()
    job = admitted(batcher)
    timer = threading.Timer(0.05, batcher.push, args=(job, segments(1)))
    timer.start()
    run(batcher.take(oldest(1), wait_s=10))
    assert job.settled
    timer.join()


@settings(max_examples=150, deadline=None)
@given(
    items=st.lists(
        st.tuples(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.sampled_from(["run", "cancel", "late"])),
        max_size=20,
    ),
    data=st.data(),
)
def test_nothing_is_lost_or_run_twice(items: list[tuple[list[int], str]], data: st.DataObject) -> None:
    clock = Clock()
    batcher = make_batcher(clock, max_queue_ms=1e9, max_ready_patches=10**9)
    jobs: dict[Job, str] = {}
    for rows, fate in items:
        job = admitted(batcher, cost_ms=sum(rows) / 3, deadline_s=clock() + 1 if fate == "late" else None)
        jobs[job] = fate
        batcher.push(job, segments(*rows))
        if fate == "cancel":
            job.fail(EncodeError("cancelled"))
    clock.now += 2
    seen: set[tuple[Job, int]] = set()

    def plan(pending: Sequence[SegmentShape]) -> Replay:
        others = data.draw(st.sets(st.integers(1, len(pending) - 1), max_size=4)) if len(pending) > 1 else set()
        return Replay(key=None, taken=(0, *sorted(others)))

    while (batch := batcher.take(plan, wait_s=0)) is not None:
        for entry in batch.entries:
            assert (entry.job, entry.index) not in seen
            seen.add((entry.job, entry.index))
        run(batch)
    assert all(job.settled for job in jobs)
    assert all((job.error is None) == (fate == "run") for job, fate in jobs.items())
    expected = {(job, index) for job, fate in jobs.items() if fate == "run" for index in range(len(job.outputs))}
    assert seen == expected
    assert (batcher.num_admitted, batcher.num_waiting, batcher.backlog_ms) == (0, 0, 0)
