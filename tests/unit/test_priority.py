"""Interactive before batch, batch not for ever behind it, and a queue that is bounded for both."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from fakes import Clock, fake_adapter
from hypothesis import given, settings
from hypothesis import strategies as st

from encoder.adapters.base import Segment
from encoder.errors import PoolSaturatedError
from encoder.packing import Replay
from encoder.types import SegmentShape
from workers.admission import GUARANTEED, Load, wait_ms
from workers.batcher import Batcher
from workers.job import Job
from workers.priority import Line, Priority, rank_s

INTERACTIVE, BATCH = Priority
PATIENCE_S = 5.0


@dataclass(frozen=True, eq=False)
class Entry:
    came_s: float
    priority: Priority

    @property
    def rank_s(self) -> float:
        return rank_s(self.priority, self.came_s, PATIENCE_S)


ARRIVALS = st.lists(st.tuples(st.floats(0, 3), st.sampled_from(Priority), st.integers(0, 3)), max_size=40)


@given(arrivals=ARRIVALS)
def test_a_line_serves_by_rank_and_first_come_first_within_a_priority(
    arrivals: list[tuple[float, Priority, int]],
) -> None:
    line: Line[Entry] = Line()
    now_s, inside, served = 0.0, list[Entry](), list[Entry]()

    def serve() -> None:
        entry = line.pop()
        assert entry is not None
        assert entry.rank_s == min(other.rank_s for other in inside)
        inside.remove(entry)
        served.append(entry)

    for wait_s, priority, num_served in arrivals:
        now_s += wait_s
        entry = Entry(now_s, priority)
        line.append(entry)
        inside.append(entry)
        for _ in range(min(num_served, len(inside))):
            serve()
    while inside:
        serve()
    assert line.pop() is None
    assert len(set(served)) == len(served) == len(arrivals)
    for priority in Priority:
        came = [entry.came_s for entry in served if entry.priority is priority]
        assert came == sorted(came)


@given(arrivals=ARRIVALS)
def test_a_batch_item_is_passed_only_by_what_comes_within_its_patience(
    arrivals: list[tuple[float, Priority, int]],
) -> None:
    line: Line[Entry] = Line()
    now_s, waiting = 0.0, list[Entry]()
    for wait_s, priority, num_served in arrivals:
        now_s += wait_s
        entry = Entry(now_s, priority)
        line.append(entry)
        waiting.append(entry)
        for _ in range(min(num_served, len(waiting))):
            entry = line.pop()  # type: ignore[assignment]
            waiting.remove(entry)
            passed = [other for other in waiting if other.came_s < entry.came_s]
            assert all(other.priority is BATCH and entry.priority is INTERACTIVE for other in passed)
            assert all(entry.came_s <= other.came_s + PATIENCE_S for other in passed)


@given(arrivals=ARRIVALS, num_taken=st.integers(0, 40))
def test_what_is_put_back_keeps_its_place(arrivals: list[tuple[float, Priority, int]], num_taken: int) -> None:
    line: Line[Entry] = Line()
    now_s = 0.0
    for wait_s, priority, _ in arrivals:
        now_s += wait_s
        line.append(Entry(now_s, priority))
    taken = [entry for _ in range(min(num_taken, len(line))) if (entry := line.pop()) is not None]
    line.put_back(taken)
    again = [line.pop() for _ in taken]
    assert again == taken


LOADS = st.builds(Load, st.floats(0, 200), st.integers(0, 200))
LIMIT = Load(100.0, 100)


@given(interactive=LOADS, batch=LOADS, item=st.builds(Load, st.floats(0.1, 150), st.integers(1, 150)))
def test_a_priority_is_refused_only_above_the_bounds_and_above_its_own_part(
    interactive: Load, batch: Load, item: Load
) -> None:
    total = Load(interactive.ms + batch.ms, interactive.num_bytes + batch.num_bytes)
    for own in (interactive, batch):
        retry_ms = wait_ms(item, total=total, own=own, limit=LIMIT)
        fits = total.ms + item.ms <= LIMIT.ms and total.num_bytes + item.num_bytes <= LIMIT.num_bytes
        part = LIMIT * GUARANTEED
        fits_part = own.ms + item.ms <= part.ms and own.num_bytes + item.num_bytes <= part.num_bytes
        assert (retry_ms == 0) == (fits or fits_part or own.ms == 0)
        assert retry_ms <= total.ms + item.ms


# --- the worker's queue ----------------------------------------------------------------------------------------------


def segments(*rows: int) -> list[Segment]:
    return [
        Segment(shape=fake_adapter().measure((1, height, 10)), patches_PC=np.zeros((height * 10, 3), np.uint8))
        for height in rows
    ]


def make(clock: Clock, **settings: float) -> Batcher:
    return Batcher(
        **{"max_queue_ms": 100.0, "max_ready_patches": 10**6, "batch_patience_s": PATIENCE_S, **settings},  # type: ignore[arg-type]
        now_s=clock,
    )


def bring(batcher: Batcher, priority: Priority, cost_ms: float = 10.0, num_bytes: int = 0) -> Job:
    job = Job(cost_ms=cost_ms, priority=priority, num_bytes=num_bytes)
    job.on_settled = batcher.release
    batcher.admit(job)
    batcher.push(job, segments(1))
    return job


def first(pending: Sequence[SegmentShape]) -> Replay:
    return Replay(key=None, taken=(0,))


def serve(batcher: Batcher) -> Job:
    batch = batcher.take(first, wait_s=0)
    assert batch is not None
    (entry,) = batch.entries
    entry.job.deliver(entry.index, torch.zeros(1, 1))
    return entry.job


def test_an_interactive_item_passes_the_batch_items_that_wait() -> None:
    clock = Clock()
    batcher = make(clock)
    batch = [bring(batcher, BATCH) for _ in range(5)]
    assert serve(batcher) is batch[0]
    clock.now += 1
    urgent = bring(batcher, INTERACTIVE)
    assert serve(batcher) is urgent
    assert [serve(batcher) for _ in batch[1:]] == batch[1:]


def test_a_queue_full_of_one_priority_still_takes_the_other() -> None:
    for full, other in (Priority, reversed(Priority)):
        batcher = make(Clock())
        for _ in range(10):
            bring(batcher, full)
        with pytest.raises(PoolSaturatedError, match="holds 100 ms of work and takes 100; retry in 10 ms"):
            bring(batcher, full)
        bring(batcher, other)
        bring(batcher, other)
        with pytest.raises(PoolSaturatedError, match="retry in 5 ms"):  # of the 25 that are its own
            bring(batcher, other)


@settings(max_examples=12, deadline=None)
@given(
    costs_ms=st.lists(st.sampled_from([1.0, 5.0, 20.0]), min_size=1, max_size=4), batch_ms=st.sampled_from([1.0, 10.0])
)
def test_batch_work_gets_through_a_flood_of_interactive_work_in_bounded_time(
    costs_ms: list[float], batch_ms: float
) -> None:
    """As much interactive work as the door lets in, always; a batch item now and then, until it is let in."""
    clock, patience_s = Clock(), 0.5
    batcher = make(clock, batch_patience_s=patience_s)
    came: dict[Job, float] = {}
    waits_s: list[float] = []
    asked_s: float | None = None
    number = 0
    while len(waits_s) < 5:
        while True:  # the flood
            try:
                bring(batcher, INTERACTIVE, costs_ms[number % len(costs_ms)])
            except PoolSaturatedError:
                break
            number += 1
        try:
            asked_s = clock.now if asked_s is None else asked_s
            came[bring(batcher, BATCH, batch_ms)] = asked_s
            asked_s = None
        except PoolSaturatedError:
            pass
        job = serve(batcher)
        clock.now += job.cost_ms / 1e3
        if job in came:
            waits_s.append(clock.now - came.pop(job))
    # Until it is let in, its own kind ahead of it goes; then its patience, then what is ahead of it by then.
    once_in_s = patience_s + (1 + GUARANTEED) * 0.1 + 0.02
    assert max(waits_s) <= 2 * once_in_s


def test_a_queue_is_bounded_in_bytes_as_it_came_and_as_patches() -> None:
    batcher = make(Clock(), max_queue_bytes=2**20)
    bring(batcher, BATCH, num_bytes=2**19)
    assert batcher.backlog_bytes == 2**19 + 30
    with pytest.raises(PoolSaturatedError, match=r"holds 0\.5 MiB and takes 1\.0; retry in \d+ ms"):
        bring(batcher, BATCH, num_bytes=2**19)
    bring(batcher, INTERACTIVE, num_bytes=2**19)
    serve(batcher)
    serve(batcher)
    assert batcher.backlog_bytes == 0
    bring(batcher, BATCH, num_bytes=2**30)  # alone it always fits


def test_decoded_patches_count_in_the_part_that_is_a_priority_s_own() -> None:
    batcher = make(Clock(), max_queue_bytes=400)
    bring(batcher, BATCH, num_bytes=390)
    bring(batcher, INTERACTIVE, num_bytes=50)  # and 30 of patches: 80 of the 100 that are its own
    with pytest.raises(PoolSaturatedError, match="MiB"):
        bring(batcher, INTERACTIVE, num_bytes=30)
    bring(batcher, INTERACTIVE, num_bytes=20)


def test_decoding_of_interactive_items_goes_on_while_decoded_batch_work_waits() -> None:
    batcher = make(Clock(), max_ready_patches=40)

    def bring_undecoded(priority: Priority) -> None:
        job = Job(cost_ms=1.0, priority=priority)
        batcher.admit(job)
        batcher.decode_later(job, lambda: batcher.push(job, segments(4)))

    for priority in (BATCH, BATCH, INTERACTIVE):
        bring_undecoded(priority)
        if priority is not BATCH or not batcher.num_waiting:
            decode = batcher.next_decode()
            assert decode is not None
            decode()
    assert batcher.num_waiting == 2
    thread = threading.Thread(target=batcher.next_decode)  # the other batch item waits for room
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    assert [serve(batcher).priority for _ in range(2)] == [INTERACTIVE, BATCH]
    thread.join(5)
    assert not thread.is_alive()
