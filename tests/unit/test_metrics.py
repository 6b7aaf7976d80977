"""Metrics: one list of names, what workers and router count under them, and how Prometheus and Ray read it."""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import pytest
from fakes import Clock, FakeRunner, batch, breaks_on, fake_adapter, graph, loader, picture, report, until
from prometheus_client.parser import text_string_to_metric_families

from cluster.dashboard import dashboard
from cluster.routing.leases import LeaseRequest
from cluster.routing.router import Router
from encoder.config import EncoderConfig
from encoder.graph_use import GraphUse
from encoder.types import ItemShape
from workers.config import WorkerConfig
from workers.messages import WorkerState, WorkerStats
from workers.metric_names import BY_NAME, METRICS, STAGES, Metric
from workers.metrics import Meter, samples_of
from workers.prometheus import render, series
from workers.ray_metrics import RayExporter
from workers.samples import Distribution, Sample
from workers.worker import EncoderWorker


@pytest.fixture
def worker() -> Iterator[EncoderWorker]:
    runner = FakeRunner()
    runner.break_run = breaks_on(66, ValueError("boom"))
    config = WorkerConfig.model_validate(
        {"encoder": EncoderConfig(model="fake"), "device": "cpu", "decode_threads": 1, "cache_bytes": 2**20}
    )
    worker = EncoderWorker(config, "w", load=loader(runner))
    worker.start()
    worker.wait_started(20)
    yield worker
    worker.close()


def parsed(text: str) -> dict[tuple[str, tuple[str, ...]], float]:
    """Name and label values to value, by Prometheus's own parser."""
    return {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_names_follow_prometheus_and_differ() -> None:
    assert len(BY_NAME) == len(METRICS)
    for metric in METRICS:
        name = metric.name.removesuffix("_total")
        assert metric.name.startswith("encpool_")
        assert (metric.kind == "counter") == metric.name.endswith("_total")
        assert not metric.unit or name.endswith(f"_{metric.unit}"), metric.name
        assert metric.help.endswith(".")
        assert set(metric.labels) <= {
            "worker", "source", "stage", "graph", "reason", "outcome", "result", "state", "route", "status",
        }  # fmt: skip
        assert list(metric.buckets) == sorted(metric.buckets)


def test_what_a_worker_did_comes_out_in_prometheus_text(worker: EncoderWorker) -> None:
    for encoded in (picture(1), picture(66), picture(2, width=300)):
        worker.encode(batch(encoded))
    until(lambda: worker.report().stats.cache.num_entries == 2)
    worker.encode(batch(picture(1)))
    found = parsed(render(samples_of(worker.report())))
    name = str(graph().key)
    assert found["encpool_items_total", ("w", "encoded")] == 2
    assert found["encpool_items_total", ("w", "failed")] == 1
    assert found["encpool_items_total", ("w", "cached")] == 1
    assert found["encpool_tokens_total", ("w",)] == 2 + 6 + 2
    assert found["encpool_segment_hits_total", ("w", name)] == 1 + 3
    assert found["encpool_cache_items_total", ("w", "hit")] == 1
    assert found["encpool_cache_items_total", ("w", "miss")] == 3
    assert found["encpool_cache_entries", ("w",)] == 2
    assert found["encpool_capture_seconds", ("w",)] == 0.5
    assert found["encpool_queue_seconds", ("w",)] == 0
    counts = {stage: found["encpool_stage_seconds_count", ("w", stage)] for stage in ("decode", "wait", "cache")}
    assert counts == {"decode": 2, "wait": 2, "cache": 4}, "of what came out"
    assert found["encpool_stage_seconds_bucket", ("w", "decode", "+Inf")] == 2
    assert {labels[1] for name, labels in found if name == "encpool_stage_seconds_sum"} <= set(STAGES)


def test_predicted_and_real_cost_stand_side_by_side() -> None:
    use = GraphUse(replays=3, segments=5, useful_patches=90, run_patches=100, predicted_ms=30.0, real_ms=33.0)
    stats = WorkerStats(graph_uses={"g": use}, segment_misses={"too_large": 4}, num_eager_runs=2)
    found = parsed(render(samples_of(report("w", stats=stats, cost_error=0.1, graph_bytes=7))))
    assert found["encpool_predicted_gpu_seconds_total", ("w", "g")] == pytest.approx(0.030)
    assert found["encpool_gpu_seconds_total", ("w", "g")] == pytest.approx(0.033)
    assert found["encpool_cost_error_ratio", ("w",)] == 0.1
    assert found["encpool_useful_patches_total", ("w", "g")] / found["encpool_run_patches_total", ("w", "g")] == 0.9
    assert found["encpool_segment_misses_total", ("w", "too_large")] == 4
    assert found["encpool_graph_bytes", ("w",)] == 7


def test_what_the_router_knows_comes_out_too() -> None:
    router = Router(
        fake_adapter(), lease_timeout_s=60, silent_timeout_s=1e9, client_timeout_s=1e9, now_s=Clock(), rng=Random(0)
    )
    full = {"graphs": (graph(2, cost_ms=60.0),), "max_queue_ms": 100.0}
    router.register(report("a", **full))
    router.register(report("b", state=WorkerState.DRAINING, **full))
    shape = ItemShape(grids=((1, 10, 10),), num_patches=100, num_tokens=2)
    router.assign([LeaseRequest(shape=shape)] * 3)
    found = parsed(render(router.samples()))
    assert found["encpool_workers", ("ready",)] == 1
    assert found["encpool_workers", ("draining",)] == 1
    assert found["encpool_workers_leasable", ()] == 1
    assert found["encpool_leases_asked_total", ()] == 3
    assert found["encpool_leases_refused_total", ()] == 2
    assert found["encpool_leases_in_flight", ("a",)] == 1
    assert found["encpool_in_flight_seconds", ("a",)] == pytest.approx(0.060)


def test_a_metric_of_many_workers_has_one_heading() -> None:
    text = render([*samples_of(report("a")), *samples_of(report("b"))])
    assert text.count("# TYPE encpool_queue_seconds gauge") == 1
    assert 'encpool_queue_seconds{worker="b"} 0\n' in text


def test_odd_label_values_survive() -> None:
    odd = 'a "quoted"\\ name\nin two lines'
    found = parsed(render([Sample("encpool_retries_total", ("c", odd), 1)]))
    assert found["encpool_retries_total", ("c", odd)] == 1


def test_a_histogram_counts_up_to_each_end() -> None:
    meter = Meter("w")
    for value in (0.0, 0.0001, 0.05, 1000.0):
        meter.observe("encpool_stage_seconds", "wait", value=value)
    (sample,) = meter.samples()
    assert isinstance(sample.value, Distribution)
    by_end = {labels["le"]: value for name, labels, value in series(sample) if name.endswith("_bucket")}
    assert (by_end["0.0001"], by_end["0.03"], by_end["0.1"], by_end["30"], by_end["+Inf"]) == (2, 2, 3, 3, 4)
    assert math.isclose(sample.value.total, 1000.0501)


def test_names_that_are_not_in_the_list_cannot_be_counted() -> None:
    meter = Meter()
    meter.add("encpool_surprises_total")
    with pytest.raises(KeyError, match="encpool_surprises_total"):
        meter.samples()
    with pytest.raises(KeyError):
        meter.observe("encpool_surprise_seconds", value=1.0)


def test_counting_in_many_threads_loses_nothing() -> None:
    meter = Meter()

    def count() -> None:
        for _ in range(2000):
            meter.add("encpool_http_requests_total", "/v1/encode", "200")
            meter.observe("encpool_http_seconds", "/v1/encode", value=0.01)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    values = {sample.name: sample.value for sample in meter.samples()}
    assert values["encpool_http_requests_total"] == 8000
    distribution = values["encpool_http_seconds"]
    assert isinstance(distribution, Distribution)
    assert distribution.num_observations == 8000


def test_every_name_that_reports_use_has_the_labels_of_the_list(worker: EncoderWorker) -> None:
    worker.encode(batch(picture(1)))
    for sample in samples_of(worker.report()):
        assert len(sample.labels) == len(BY_NAME[sample.name].labels), sample
        assert {name for name, _, _ in series(sample)} <= series_names()


class RayMetric:
    """Stands in for Ray's: what it was told."""

    told: list[tuple[str, float, dict[str, str]]]

    def __init__(self, name: str, *, description: str, tag_keys: tuple[str, ...]) -> None:
        self.name, self.tag_keys = name, tag_keys

    def set(self, value: float, *, tags: dict[str, str]) -> None:
        assert tuple(tags) == self.tag_keys
        self.told.append((self.name, value, tags))

    inc = set


def test_ray_is_told_once_a_second_what_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, float, dict[str, str]]] = []
    RayMetric.told = told
    monkeypatch.setattr("ray.util.metrics.Counter", RayMetric)
    monkeypatch.setattr("ray.util.metrics.Gauge", RayMetric)
    clock, meter = Clock(), Meter("w")
    exporter = RayExporter(now_s=clock)
    meter.add("encpool_tokens_total", amount=5)
    meter.set("encpool_graphs", value=3)
    assert exporter.export(meter.samples)
    assert told == [("encpool_tokens_total", 5, {"worker": "w"}), ("encpool_graphs", 3, {"worker": "w"})]
    told.clear()
    meter.add("encpool_tokens_total", amount=2)
    assert not exporter.export(meter.samples)
    clock.now += 1
    assert exporter.export(meter.samples)
    assert told == [("encpool_tokens_total", 2, {"worker": "w"})], "what grew, by how much; nothing that stayed"


def test_ray_hears_no_more_of_what_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, float, dict[str, str]]] = []
    RayMetric.told = told
    monkeypatch.setattr("ray.util.metrics.Counter", RayMetric)
    monkeypatch.setattr("ray.util.metrics.Gauge", RayMetric)
    clock = Clock()
    exporter = RayExporter(now_s=clock)

    def export(*samples: Sample) -> list[tuple[str, float, dict[str, str]]]:
        told.clear()
        clock.now += 1
        assert exporter.export(lambda: samples)
        return told

    asked, ready = Sample("encpool_leases_asked_total", (), 5), Sample("encpool_workers", ("ready",), 2)
    export(Sample("encpool_workers", ("starting",), 2), asked)
    assert export(ready) == [
        ("encpool_workers", 2, {"state": "ready"}),
        ("encpool_workers", 0.0, {"state": "starting"}),
    ]
    assert export(ready, asked) == [], "a counter goes on from where it was"


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_every_help_can_be_read_without_its_neighbours(metric: Metric) -> None:
    assert not re.search(r"\b(those|they|same|of it)\b", metric.help, re.IGNORECASE)


# --- the dashboard ---

DASHBOARD = Path(__file__).parents[2] / "configs/grafana-dashboard.json"


def expressions() -> list[str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", ())]


def test_the_dashboard_is_the_one_in_the_code() -> None:
    assert json.loads(DASHBOARD.read_text()) == dashboard(), (
        "run: python -m cluster.dashboard > configs/grafana-dashboard.json"
    )


def series_names(metrics: Sequence[Metric] = METRICS) -> frozenset[str]:
    """Every name that may be queried."""
    endings = {"histogram": ("_bucket", "_sum", "_count")}
    return frozenset(metric.name + end for metric in metrics for end in endings.get(metric.kind, ("",)))


def test_the_dashboard_asks_for_names_of_the_list_alone() -> None:
    asked = {name for text in expressions() for name in re.findall(r"\$\{prefix\}(\w+)", text)}
    assert asked <= series_names()
    assert len(re.findall("encpool_", "".join(expressions()))) == len(
        re.findall(r"\$\{prefix\}encpool_", "".join(expressions()))
    )
    assert len(asked) > 20
    assert {"encpool_gpu_seconds_total", "encpool_eager_gpu_seconds_total"} <= asked, "how busy the GPUs are"


def test_the_dashboard_groups_by_labels_that_its_metrics_have() -> None:
    labels = {name: metric.labels for metric in METRICS for name in series_names([metric])}
    for text in expressions():
        assert text.count("(") == text.count(")"), text
        for grouped, name in re.findall(r"sum by \(([^)]*)\) \((?:rate\()?\$\{prefix\}(\w+)", text):
            assert set(grouped.split(", ")) <= {*labels[name], "le"}, text


def test_panels_of_the_dashboard_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        assert place["x"] + place["w"] <= 24
        taken |= cells
