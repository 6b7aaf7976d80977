"""`encpool bench change`: which graphs it asks for, and what it prints."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from fakes import graph

from cluster.benchmark.change import Figures, measure_change, other_graphs, table
from encoder.benchmark.files import save_json
from encoder.config import EncoderConfig
from workers.config import WorkerConfig


def test_every_second_graph_gives_way_to_one_of_another_budget() -> None:
    held = [graph(budget).key for budget in (16, 4, 8, 32)]
    assert sorted(key.token_budget for key in other_graphs(held)) == [4, 12, 16, 36]
    wanted = other_graphs([graph(budget).key for budget in range(64, 641, 64)])
    assert sorted(key.token_budget for key in wanted) == [64, 192, 320, 448, 576, 704, 768, 832, 896, 960]


def test_the_bench_measures_a_small_worker_and_says_so(tmp_path: Path) -> None:
    config = WorkerConfig(encoder=EncoderConfig(model="tiny-minicpmv-2.6", token_budgets=(64, 128)), device="cpu")
    figures: Figures = measure_change(config, seconds=0.5, num_threads=1, num_items=1)
    assert (figures.num_captures, figures.num_drops) == (1, 1)
    assert figures.worst_distance < 1e-4
    report = {"date": "today", "runs": [asdict(figures)]}
    assert "during / before" in table(report)
    save_json(report, tmp_path / "figures.json")
    assert json.loads((tmp_path / "figures.json").read_text()) == report
