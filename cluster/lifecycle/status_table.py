"""A pool's state for people and for programs: `encpool status` and `encpool top`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cluster.lifecycle.stats import PoolStats
from cluster.lifecycle.status import PoolStatus, WorkerStatus
from cluster.tables import aligned
from workers.messages import WorkerReport

COLUMNS = ("worker", "model", "state", "host", "device", "graphs", "queue ms", "items", "hit rate", "fill", "cache",
           "restarts")  # fmt: skip
RIGHT = ("graphs", "queue ms", "items", "hit rate", "fill", "cache", "restarts")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One worker. What it does not say is None."""

    worker: str
    group: str
    model: str
    state: str
    host: str | None
    device: str | None
    gpu_uuid: str | None
    pid: int | None
    num_graphs: int | None
    queue_ms: float | None
    num_items: int | None
    hit_rate: float | None
    fill: float | None
    cache_hit_rate: float | None
    num_restarts: int
    error: str | None


def rows_of(status: PoolStatus, stats: PoolStats) -> list[Row]:
    """What the supervisor, the router and the workers themselves say, side by side."""
    reports = {report.worker_id: report for report in stats.reports}
    return [_row(worker, status.models[worker.group], reports.get(worker.worker_id)) for worker in status.workers]


def _row(worker: WorkerStatus, model: str, report: WorkerReport | None) -> Row:
    member = worker.member
    alone = None if report is None else PoolStats(num_workers=1, members=(), reports=(report,))
    asked = 0 if alone is None else alone.cache.hits + alone.cache.joins + alone.cache.misses
    return Row(
        worker=worker.worker_id,
        group=worker.group,
        model=model,
        state=str(worker.stage),
        host=None if member is None else member.host,
        device=None if report is None else report.device,
        gpu_uuid=None if member is None else member.gpu_uuid,
        pid=None if report is None else report.pid,
        num_graphs=None if report is None else len(report.graphs),
        queue_ms=None if member is None else member.in_flight_ms,
        num_items=None if alone is None else alone.num_items,
        hit_rate=None if alone is None or not _has_run(alone) else alone.hit_rate,
        fill=None if alone is None or not _has_run(alone) else alone.fill,
        cache_hit_rate=alone.cache.hit_rate if alone is not None and asked else None,
        num_restarts=worker.num_restarts,
        error=worker.error,
    )


def _has_run(stats: PoolStats) -> bool:
    return bool(stats.segment_hits or stats.segment_misses)


def status_table(status: PoolStatus, stats: PoolStats) -> str:
    """For people: a line on the pool, a line a worker, what was decided on graphs, and what went wrong lately."""
    rows, columns = rows_of(status, stats), columns_of(status)
    lines = [headline(status), "", aligned(columns, [cells(row, columns) for row in rows], right=RIGHT)]
    notes = [*graph_lines(status), *(f"{row.worker}: {row.error}" for row in rows if row.error), *status.notes]
    return "\n".join([*lines, *(["", *notes] if notes else [])])


def graph_lines(status: PoolStatus) -> list[str]:
    """The last decision on the graphs of each model."""
    lines = []
    for one in status.replanning:
        model = f" of {one.model}" if len(status.replanning) > 1 else ""
        then = "" if one.next_look_s is None else f"; next look in {one.next_look_s:.0f} s"
        lines.append(f"graphs{model}, {one.age_s:.0f} s ago: {one.note}{then}")
    return lines


def headline(status: PoolStatus) -> str:
    """The pool in one line."""
    groups = " + ".join(f"{count} {name}" for name, count in status.targets.items())
    if status.failure is not None:
        return f"pool {status.name!r} could not start: {status.failure.message}"
    wanted = f"{status.num_ready} of {sum(status.targets.values())} workers ready"
    return (
        f"pool {status.name!r}: {', '.join(_models(status))}, {wanted}"
        f"{f' ({groups})' if len(status.targets) > 1 else ''}{'' if status.started else ', starting'}"
    )


def _models(status: PoolStatus) -> list[str]:
    return list(dict.fromkeys(status.models.values()))


def columns_of(status: PoolStatus) -> tuple[str, ...]:
    """Names of the table's columns: each worker's model is told where there are several."""
    return tuple(name for name in COLUMNS if name != "model" or len(_models(status)) > 1)


def cells(row: Row, columns: Sequence[str]) -> tuple[str, ...]:
    """These columns of a row, as text."""
    gpu = "" if row.gpu_uuid is None else f" {row.gpu_uuid.removeprefix('GPU-')[:8]}"
    texts = {
        "worker": row.worker,
        "model": row.model,
        "state": row.state,
        "host": row.host or "-",
        "device": f"{row.device or '-'}{gpu}",
        "graphs": _text(row.num_graphs, "d"),
        "queue ms": _text(row.queue_ms, ".0f"),
        "items": _text(row.num_items, "d"),
        "hit rate": _text(row.hit_rate, ".0%"),
        "fill": _text(row.fill, ".0%"),
        "cache": _text(row.cache_hit_rate, ".0%"),
        "restarts": str(row.num_restarts),
    }
    return tuple(texts[name] for name in columns)


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def status_json(status: PoolStatus, stats: PoolStats) -> dict[str, Any]:
    """For programs."""
    return {
        "name": status.name,
        "models": _models(status),
        "started": status.started,
        "targets": dict(status.targets),
        "num_ready": status.num_ready,
        "num_items": stats.num_items,
        "hit_rate": stats.hit_rate,
        "fill": stats.fill,
        "workers": [asdict(row) for row in rows_of(status, stats)],
        "notes": list(status.notes),
        "replanning": [asdict(one) for one in status.replanning],
    }
