"""`encpool bench router`: small pools, few items, and what must hold of its figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.benchmark.days import simulate_days
from cluster.benchmark.router import bench_router, table, write_plot
from encoder.benchmark.files import save_json


def test_the_bench_prints_and_writes_what_it_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = bench_router(pools=(8, 16), num_calls=2, num_items=300, with_ray=False)
    assert capsys.readouterr().err.splitlines() == [
        "encpool: measuring decisions in process, 8 workers ...",
        "encpool: measuring decisions in process, 16 workers ...",
        "encpool: measuring a simulated day of traffic ...",
    ]
    text = table(report)
    assert "bare power of two" in text
    assert "round-robin" in text
    save_json(report, tmp_path / "out" / "figures.json")
    assert json.loads((tmp_path / "out" / "figures.json").read_text()) == report
    assert all(rate["items_per_s"] > 0 < rate["first_call_ms"] for rate in report["rates"])
    assert "ms after a change" in text


def test_the_bench_draws_its_figures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report = bench_router(pools=(8,), num_calls=1, num_items=100, with_ray=False)
    write_plot(report, tmp_path / "figures.png")
    assert (tmp_path / "figures.png").read_bytes().startswith(b"\x89PNG")


def test_a_day_ends_earliest_when_items_go_where_their_graphs_are() -> None:
    days = {day.policy: day for day in simulate_days(16, 3000)}
    ours = days.pop("router")
    assert all(ours.makespan_h < 0.8 * day.makespan_h for day in days.values())
    assert ours.hit_rate > 0.9
    assert ours == simulate_days(16, 3000)[0]
