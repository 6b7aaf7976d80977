"""The pool bench on a real pool: it counts what it sent, and sees a dead worker's items on their way to another."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import pytest

from cluster import EncoderPool
from cluster.benchmark import pool as pool_bench
from cluster.benchmark.load import measure_kill, measure_latency, measure_throughput, pictures
from cluster.benchmark.pool import table
from cluster.config import parse_config

SIZES = [(448, 448), (200, 300)]


def test_every_figure_of_a_pool_is_measured(whole_pool: EncoderPool, capsys: pytest.CaptureFixture[str]) -> None:
    pool, files = whole_pool, pictures(SIZES)
    latency = measure_latency(pool, (448, 448), repeats=5)
    throughput = measure_throughput(pool, files, num_items=20)
    kill = measure_kill(pool, files, num_items=40)
    assert latency.total_ms > latency.beyond_ms > 0
    assert throughput.num_workers == 2
    assert throughput.hit_rate == 1.0
    assert 0 < throughput.busy <= 1.05
    assert throughput.segments_per_s == pytest.approx(throughput.items_per_s)  # each of these has one segment
    assert "encpool: killing worker-" in capsys.readouterr().err, "before Ray tells of a death that is no fault"
    assert kill.num_on_board > 0
    assert 0 < kill.first_redispatch_s < 30
    assert (kill.num_items, kill.num_failed, kill.num_twice) == (40, 0, 0)


def test_the_bench_says_what_it_measures_now(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @dataclass
    class Figure:
        value: float = 1.0

    for name in ("measure_throughput", "measure_latency", "measure_kill"):
        monkeypatch.setattr(pool_bench, name, lambda *given: Figure())
    monkeypatch.setattr(pool_bench, "_bare_engine", lambda *given: {})
    monkeypatch.setattr(pool_bench.EncoderPool, "start", lambda config: nullcontext())
    config = parse_config({"num_workers": 2, "worker": {"encoder": {"model": "tiny-minicpmv-2.6"}}}, source="test")
    pool_bench.bench_pool(config, num_items=1, repeats=1, on_gpu=False)
    assert capsys.readouterr().err.splitlines() == [
        f"encpool: measuring {what} ..."
        for what in ("the engine alone", "a pool of 1", "one image alone", "a pool of 2")
    ]


def test_the_table_names_what_the_figures_compare() -> None:
    run = {"num_workers": 2, "items_per_s": 10.0, "segments_per_s": 54.0, "hit_rate": 1.0, "fill": 0.98, "busy": 0.97}
    alone = {
        "size": (448, 448),
        "total_ms": 9.0,
        "stages_ms": {"decode": 2.0},
        "beyond_ms": 4.0,
        "noop_ms": 1.0,
        "ratio": 4.0,
    }
    text = table(
        {
            "engine": {"segments_per_s": 27.0, "fill": 0.99, "busy": 0.995},
            "throughput": [{**run, "num_workers": 1, "segments_per_s": 27.0}, run],
            "latency": [alone],
            "kill": None,
        }
    )
    assert "2 workers" in text
    assert "2.00" in text
    assert "448x448" in text
    assert "97.0%" in text
