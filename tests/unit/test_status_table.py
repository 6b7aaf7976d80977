"""What `encpool status` and `encpool top` show."""

from __future__ import annotations

import io
import json
from dataclasses import replace

from fakes import fake_adapter, report
from rich.console import Console

from cluster.lifecycle.stats import PoolStats
from cluster.lifecycle.status import PoolStatus, Stage, WorkerStatus
from cluster.lifecycle.status_table import columns_of, rows_of, status_json, status_table
from cluster.lifecycle.top import items_per_s, picture
from cluster.planning.replanner import Decision
from cluster.routing.router import Router
from workers.messages import WorkerStats


def worker(worker_id: str, stage: Stage = Stage.READY, error: str | None = None) -> WorkerStatus:
    router = Router(fake_adapter(), lease_timeout_s=1, silent_timeout_s=1)
    router.register(report(worker_id, host="node-7", gpu_uuid="GPU-0123456789abcdef"))
    member = replace(router.members()[0], in_flight_ms=12.4)
    return WorkerStatus(
        worker_id=worker_id,
        group="worker",
        stage=stage,
        num_restarts=2,
        error=error,
        member=member if stage is Stage.READY else None,
    )


def pool(*workers: WorkerStatus, num_items: int = 40) -> tuple[PoolStatus, PoolStats]:
    stats = WorkerStats(
        num_items=num_items, segment_hits=3, segment_misses={"big": 1}, useful_patches=9, run_patches=10
    )
    status = PoolStatus(
        name="photos",
        started=True,
        targets={"worker": 2},
        models={"worker": "tiny"},
        workers=workers,
        notes=("worker-9 is lost: its node is gone",),
        replanning=(Decision(model="tiny", note="too few items", age_s=3.2, next_look_s=296.8, num_changes=0),),
    )
    return status, PoolStats(num_workers=1, members=(), reports=(report("worker-0", stats=stats, device="cuda:0"),))


def test_the_table_has_a_line_a_worker_and_tells_what_went_wrong() -> None:
    text = status_table(*pool(worker("worker-0"), worker("worker-1", Stage.STARTING, error="no tensors")))
    lines = text.splitlines()
    assert lines[0] == "pool 'photos': tiny, 1 of 2 workers ready"
    assert lines[3].split() == [
        "worker-0", "ready", "node-7", "cuda:0", "01234567", "1", "12", "40", "75%", "90%", "-", "2",
    ]  # fmt: skip
    assert lines[4].split()[:5] == ["worker-1", "starting", "-", "-", "-"]
    assert lines[-3:] == [
        "graphs, 3 s ago: too few items; next look in 297 s",
        "worker-1: no tensors",
        "worker-9 is lost: its node is gone",
    ]


def test_with_several_models_each_line_on_graphs_names_its_own() -> None:
    status, stats = pool(worker("worker-0"))
    other = Decision(model="other", note="changing 1 workers", age_s=0.0, next_look_s=None, num_changes=2)
    text = status_table(replace(status, replanning=(*status.replanning, other)), stats)
    assert "graphs of tiny, 3 s ago: too few items; next look in 297 s\ngraphs of other, 0 s ago: changing" in text


def test_with_several_models_the_first_line_names_all_and_each_worker_its_own() -> None:
    status, stats = pool(worker("worker-0"), replace(worker("other-0"), group="other"))
    both = replace(status, targets={"worker": 1, "other": 1}, models={"worker": "tiny", "other": "small"})
    lines = status_table(both, stats).splitlines()
    assert lines[0] == "pool 'photos': tiny, small, 2 of 2 workers ready (1 worker + 1 other)"
    assert [line.split()[:3] for line in lines[2:5]] == [
        ["worker", "model", "state"], ["worker-0", "tiny", "ready"], ["other-0", "small", "ready"],
    ]  # fmt: skip
    told = status_json(both, stats)
    assert (told["models"], [row["model"] for row in told["workers"]]) == (["tiny", "small"], ["tiny", "small"])
    console = Console(file=io.StringIO(), width=160)
    console.print(picture("pool", columns_of(both), rows_of(both, stats), {}, []))
    assert "small" in console.file.getvalue()  # type: ignore[attr-defined]


def test_programs_read_the_same_as_json() -> None:
    told = json.loads(json.dumps(status_json(*pool(worker("worker-0"), worker("worker-1", Stage.STARTING)))))
    assert (told["name"], told["num_ready"], told["targets"]) == ("photos", 1, {"worker": 2})
    assert told["workers"][0]["hit_rate"] == 0.75
    assert told["workers"][1]["queue_ms"] is None
    assert told["replanning"] == [
        {"model": "tiny", "note": "too few items", "age_s": 3.2, "next_look_s": 296.8, "num_changes": 0}
    ]


def test_top_counts_items_a_second_of_workers_that_are_the_same_process() -> None:
    status, stats = pool(worker("worker-0"), num_items=60)
    before, after = rows_of(*pool(worker("worker-0"))), rows_of(status, stats)
    assert items_per_s(before, after, 2.0) == {"worker-0": 10.0}
    assert items_per_s([], after, 2.0) == {}
    console = Console(file=io.StringIO(), width=160)
    console.print(picture("pool", columns_of(status), after, {"worker-0": 10.0}, ["a note"]))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "pool; 10.0 items/s" in shown
    assert "a note" in shown
