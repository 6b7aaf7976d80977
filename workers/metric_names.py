"""Every metric of encpool: its name, kind, unit, help and labels. Nothing is exported under a name that is not here.

The names are as the gateway's `/metrics` and the Grafana dashboard have them; Ray puts `ray_` before each. Units are
Prometheus's: seconds and bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]
Unit = Literal["", "seconds", "bytes", "ratio"]

SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Upper ends of the buckets of a histogram of times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One name."""

    name: str
    kind: Kind
    help: str
    unit: Unit = ""
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = SECONDS  # of a histogram


def _counter(name: str, *labels: str, help: str, unit: Unit = "") -> Metric:
    return Metric(name=f"encpool_{name}_total", kind="counter", unit=unit, help=help, labels=labels)


def _gauge(name: str, *labels: str, help: str, unit: Unit = "") -> Metric:
    return Metric(name=f"encpool_{name}", kind="gauge", unit=unit, help=help, labels=labels)


def _histogram(name: str, *labels: str, help: str) -> Metric:
    return Metric(name=f"encpool_{name}", kind="histogram", unit="seconds", help=help, labels=labels)


METRICS: tuple[Metric, ...] = (
    # What was asked and what came of it.
    _counter("items", "worker", "outcome", help="Items settled at a worker: encoded, cached or failed."),
    _counter("tokens", "worker", help="Output rows handed out, from the cache as well."),
    _histogram(
        "stage_seconds", "source", "stage", help="Time in each stage of an item's way; source: worker or client."
    ),
    # Graphs.
    _counter("segment_hits", "worker", "graph", help="Segments that a graph served."),
    _counter("segment_misses", "worker", "reason", help="Segments that ran eagerly, by reason."),
    _counter("replays", "worker", "graph", help="Replays of a graph."),
    _counter("eager_runs", "worker", help="Runs without a graph."),
    _counter("eager_gpu_seconds", "worker", unit="seconds", help="What runs without a graph took on the device."),
    _counter("useful_patches", "worker", "graph", help="Patches of items in the replays of a graph."),
    _counter("run_patches", "worker", "graph", help="Patches that the replays of a graph ran, padding included."),
    _gauge("fill_ratio", "worker", unit="ratio", help="Useful patches over patches run, since the start."),
    _counter("predicted_gpu_seconds", "worker", "graph", unit="seconds", help="What replays were predicted to take."),
    _counter("gpu_seconds", "worker", "graph", unit="seconds", help="What replays took on the device."),
    _gauge("cost_error_ratio", "worker", unit="ratio", help="Median |predicted - real| / real of the latest runs."),
    _gauge("graphs", "worker", help="Graphs held."),
    _gauge("graph_bytes", "worker", unit="bytes", help="Device memory that the graphs take together."),
    _gauge("capture_seconds", "worker", unit="seconds", help="What capturing at the start took."),
    # Queues.
    _gauge("queue_seconds", "worker", unit="seconds", help="Predicted GPU time of the work admitted and not done."),
    _gauge(
        "queue_limit_seconds", "worker", unit="seconds", help="Predicted GPU time of work that a worker admits at most."
    ),
    _gauge("queue_bytes", "worker", unit="bytes", help="The work admitted and not done: as it came, and decoded."),
    _gauge("segments_waiting", "worker", help="Segments decoded and not started."),
    # The embedding cache.
    _counter("cache_items", "worker", "result", help="Look-ups: hit, join (an identical item was under way) or miss."),
    _counter("cache_evictions", "worker", help="Embeddings that had to make room."),
    _counter("cache_mismatches", "worker", help="Embeddings found with another size than the item's, and dropped."),
    _gauge("cache_entries", "worker", help="Embeddings kept."),
    _gauge("cache_bytes", "worker", unit="bytes", help="Host memory of the embeddings kept."),
    _gauge("cache_limit_bytes", "worker", unit="bytes", help="Host memory that embeddings may take."),
    # The pool and its router.
    _gauge("workers", "state", help="Workers by state."),
    _gauge("workers_leasable", help="Workers that get leases."),
    _counter("leases_asked", help="Items that clients asked the router to place."),
    _counter("leases_refused", help="Items for which no worker had room."),
    _counter("leases_to_cache", help="Items sent to the worker that has them in its cache."),
    _gauge("leases_in_flight", "worker", help="Leases not settled."),
    _gauge("in_flight_seconds", "worker", unit="seconds", help="Predicted GPU time of the leases not settled."),
    # Clients.
    _counter("client_items", "source", "outcome", help="Items that ended at a client: ok, or the error's type."),
    _counter("retries", "source", "reason", help="Items that a client sent once more, by reason."),
    _counter("quarantines", "source", help="Items found to kill workers, and tried no more."),
    # The gateway.
    _counter("http_requests", "route", "status", help="HTTP requests answered."),
    _histogram("http_seconds", "route", help="Time from a request's head to the last byte of its answer."),
    _gauge("http_in_flight", help="HTTP requests under way."),
    _counter("http_items", "status", help="Items of requests answered, each with its own HTTP status."),
    _counter("http_received_bytes", unit="bytes", help="Bodies of requests."),
    _counter("http_sent_bytes", unit="bytes", help="Tokens sent over HTTP."),
    _gauge("http_items_in_flight", help="Items of HTTP requests under way."),
    _gauge("http_in_flight_bytes", unit="bytes", help="HTTP requests under way, their tokens included."),
)

BY_NAME: dict[str, Metric] = {metric.name: metric for metric in METRICS}

STAGES = ("probe", "route", "transfer", "cache", "decode", "wait", "replay", "copy_out", "total")
"""Values of the label `stage`: probe, route, transfer and total at clients, the others at workers."""
