"""`encpool trace`: what a pool has encoded arrives in the file, whatever ends the recording."""

from __future__ import annotations

from pathlib import Path

from fakes import Clock

from cluster.planning.recording import record
from cluster.planning.traces import TraceWriter, read_trace
from workers.messages import TracedItem


def item(ms: float) -> TracedItem:
    return TracedItem(
        time_s=1e9 + ms, model="toy", grids=((1, 3, 4), (1, 2, 2)), graphs=("g",), misses=("too_large",), ms=ms
    )


def test_items_of_the_time_are_written_and_those_before_it_are_not(tmp_path: Path) -> None:
    clock, told = Clock(), list[int]()
    batches = [[item(0.0)], [item(1.0), item(2.0)], [], [item(3.0)]]

    def sleep(seconds: float) -> None:
        clock.now += seconds

    with TraceWriter(tmp_path / "t.trace") as writer:
        number = record(lambda: batches.pop(0), writer, duration_s=2.5, tell=told.append, now_s=clock, sleep=sleep)
    records = list(read_trace(tmp_path / "t.trace"))
    assert number == 3
    assert told == [2, 2, 3]
    assert [one.ms for one in records] == [1.0, 2.0, 3.0]
    assert (records[0].model, records[0].grids, records[0].graphs, records[0].misses) == (
        "toy", item(0.0).grids, ("g",), ("too_large",),
    )  # fmt: skip


def test_ctrl_c_ends_the_recording_and_keeps_everything(tmp_path: Path) -> None:
    batches = [[], [item(1.0)], [item(2.0)]]
    naps = iter([None, KeyboardInterrupt()])

    def sleep(seconds: float) -> None:
        stop = next(naps)
        if stop is not None:
            raise stop

    with TraceWriter(tmp_path / "t.trace") as writer:
        assert record(lambda: batches.pop(0), writer, sleep=sleep) == 2
    assert [one.ms for one in read_trace(tmp_path / "t.trace")] == [1.0, 2.0]
