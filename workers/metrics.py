"""`Meter`: counts under the names of metric_names.py, cheaply, in any thread. `samples_of`: a report in those names.

An observation is a dictionary update under a lock, about a microsecond. Values are cumulative, so whoever exports
reads them as rarely as it likes.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterator
from typing import TYPE_CHECKING

from workers.metric_names import BY_NAME
from workers.samples import Distribution, Sample

if TYPE_CHECKING:
    from workers.messages import WorkerReport


class Meter:
    """Counters, gauges and histograms of one process."""

    def __init__(self, *common: str) -> None:
        """`common` are the values of the first labels of every metric counted here, such as the worker's id."""
        self._common = common
        self._lock = threading.Lock()
        self._values: dict[tuple[str, tuple[str, ...]], float] = {}
        self._counts: dict[tuple[str, tuple[str, ...]], list[int]] = {}

    def add(self, name: str, *labels: str, amount: float = 1) -> None:
        """Let a counter grow."""
        key = (name, labels)
        with self._lock:
            self._values[key] = self._values.get(key, 0) + amount

    def set(self, name: str, *labels: str, value: float) -> None:
        """Move a gauge."""
        with self._lock:
            self._values[name, labels] = value

    def observe(self, name: str, *labels: str, value: float) -> None:
        """Put a value into a histogram."""
        key = (name, labels)
        with self._lock:
            counts = self._counts.get(key)
            if counts is None:
                counts = self._counts[key] = [0] * (len(BY_NAME[name].buckets) + 1)
            counts[bisect_left(BY_NAME[name].buckets, value)] += 1
            self._values[key] = self._values.get(key, 0) + value

    def samples(self) -> tuple[Sample, ...]:
        """Everything counted so far. Raises KeyError for a name that is not in the list."""
        with self._lock:
            values, counts = dict(self._values), {key: tuple(counts) for key, counts in self._counts.items()}
        return tuple(
            Sample(
                BY_NAME[name].name,
                self._common + labels,
                Distribution(counts[name, labels], value) if (name, labels) in counts else value,
            )
            for (name, labels), value in values.items()
        )


def samples_of(report: WorkerReport) -> Iterator[Sample]:
    """A worker's report as metrics."""
    worker, stats, cache = report.worker_id, report.stats, report.stats.cache
    num_encoded = stats.num_items - stats.num_failed - stats.num_cached
    outcomes = {"encoded": num_encoded, "cached": stats.num_cached, "failed": stats.num_failed}
    for outcome, count in outcomes.items():
        yield Sample("encpool_items_total", (worker, outcome), count)
    for graph, use in stats.graph_uses.items():
        yield Sample("encpool_segment_hits_total", (worker, graph), use.segments)
        yield Sample("encpool_replays_total", (worker, graph), use.replays)
        yield Sample("encpool_useful_patches_total", (worker, graph), use.useful_patches)
        yield Sample("encpool_run_patches_total", (worker, graph), use.run_patches)
        yield Sample("encpool_predicted_gpu_seconds_total", (worker, graph), use.predicted_ms / 1e3)
        yield Sample("encpool_gpu_seconds_total", (worker, graph), use.real_ms / 1e3)
    for reason, count in stats.segment_misses.items():
        yield Sample("encpool_segment_misses_total", (worker, reason), count)
    yield Sample("encpool_eager_runs_total", (worker,), stats.num_eager_runs)
    yield Sample("encpool_eager_gpu_seconds_total", (worker,), stats.eager_ms / 1e3)
    yield Sample("encpool_fill_ratio", (worker,), stats.fill)
    if report.cost_error is not None:
        yield Sample("encpool_cost_error_ratio", (worker,), report.cost_error)
    yield Sample("encpool_graphs", (worker,), len(report.graphs))
    yield Sample("encpool_graph_bytes", (worker,), report.graph_bytes)
    yield Sample("encpool_capture_seconds", (worker,), stats.capture_s)
    yield Sample("encpool_queue_seconds", (worker,), report.backlog_ms / 1e3)
    yield Sample("encpool_queue_limit_seconds", (worker,), report.max_queue_ms / 1e3)
    yield Sample("encpool_queue_bytes", (worker,), report.backlog_bytes)
    yield Sample("encpool_segments_waiting", (worker,), report.num_waiting)
    if cache.max_bytes:
        for result, count in {"hit": cache.hits, "join": cache.joins, "miss": cache.misses}.items():
            yield Sample("encpool_cache_items_total", (worker, result), count)
        yield Sample("encpool_cache_evictions_total", (worker,), cache.evictions)
        yield Sample("encpool_cache_mismatches_total", (worker,), cache.mismatches)
        yield Sample("encpool_cache_entries", (worker,), cache.num_entries)
        yield Sample("encpool_cache_bytes", (worker,), cache.used_bytes)
        yield Sample("encpool_cache_limit_bytes", (worker,), cache.max_bytes)
    yield from stats.samples
