"""Graphs that come and go on a GPU: memory told and returned, costs as predicted, traffic undisturbed."""

from __future__ import annotations

import pytest
import torch

from cluster.benchmark.change import measure_change
from encoder.adapters.base import Segment
from encoder.config import EncoderConfig
from encoder.measuring import free_bytes
from encoder.pictures import TRAFFIC_SIZES, draw_picture
from encoder.runner import EncoderRunner
from encoder.types import GraphKey
from workers.config import WorkerConfig
from workers.graph_change import GraphChanger

pytestmark = pytest.mark.gpu

MODEL = "random-minicpmv-2.6"
MIB = 1 << 20
DEVICE = torch.device("cuda:0")


def made(*budgets: int, **changes: object) -> EncoderRunner:
    config = EncoderConfig.model_validate({"model": MODEL, "token_budgets": budgets or None, **changes})
    return EncoderRunner.from_config(config, "cuda:0")


def key(runner: EncoderRunner, budget: int) -> GraphKey:
    return GraphKey(encoder=runner.encoder_id, path="image", axis_keys=("packed",), token_budget=budget)


def change(runner: EncoderRunner, *budgets: int) -> None:
    """Turn to these budgets as a worker does, without traffic."""
    changer = GraphChanger(runner, limit_bytes=None)
    changer.ask([key(runner, budget) for budget in budgets])
    while changer.is_pending:
        changer.step()
    assert changer.last is not None
    assert changer.last.failed == ()


@pytest.fixture(scope="module")
def segments() -> list[Segment]:
    adapter = made(64, graphs=False).adapter
    pictures = [draw_picture(width, height, seed) for seed, (width, height) in enumerate(TRAFFIC_SIZES)]
    return [segment for picture in pictures for segment in adapter.prepare(picture)]


def test_graphs_say_what_they_take_within_a_tenth_of_what_the_device_says() -> None:
    runner = made()
    report = runner.capture()
    views = runner.graph_views()
    told = sum(view.num_bytes for view in views) + max(view.shared_bytes for view in views)
    assert told == pytest.approx(report.num_bytes, rel=0.1, abs=64 * MIB)
    assert runner.graph_memory().used_bytes == pytest.approx(report.num_bytes, rel=0.1, abs=64 * MIB)
    by_rows = sorted(views, key=lambda view: view.capacity.patches)
    assert by_rows[-1].shared_bytes > 4 * by_rows[0].shared_bytes


def test_memory_of_graphs_that_went_returns_to_the_device(segments: list[Segment]) -> None:
    runner = made(64)
    runner.capture()
    wanted = [tokens.float() for tokens in runner.encode(segments[:1])]
    before = free_bytes(DEVICE)
    change(runner, 64, 1024, 4096)
    taken = before - free_bytes(DEVICE)
    assert taken > 200 * MIB
    assert runner.graph_memory().used_bytes > 200 * MIB
    change(runner, 64)
    assert before - free_bytes(DEVICE) < 0.1 * taken + 64 * MIB
    assert not runner.outside_pool()
    assert torch.allclose(runner.encode(segments[:1])[0].float(), wanted[0], atol=2e-2, rtol=2e-2)


def test_replays_are_right_after_graphs_came_and_went_beside_them(segments: list[Segment]) -> None:
    """Graphs share scratch memory: one captured late must not disturb those captured early, nor one that went."""
    eager = made(64, graphs=False)
    expected = [eager.encode([segment])[0].float() for segment in segments[:24]]
    runner = made(64, 512)
    runner.capture()
    for budgets in ((64, 512, 256), (256, 512), (128, 1024), (1024, 64), (64,)):
        change(runner, *budgets)
        assert {view.key.token_budget for view in runner.graph_views()} == set(budgets)
        for _ in range(2):
            for tokens, wanted in zip(runner.encode(segments[:24]), expected, strict=True):
                assert float((tokens.float() - wanted).norm() / wanted.norm()) < 2e-2


def test_a_graph_that_finds_no_memory_fails_alone(segments: list[Segment]) -> None:
    runner = made(64)
    runner.capture()
    torch.cuda.empty_cache()
    hoard = torch.empty(max(0, free_bytes(DEVICE) - 512 * MIB), dtype=torch.uint8, device=DEVICE)
    try:
        failure = runner.add(key(runner, 16_384))
    finally:
        del hoard
        torch.cuda.empty_cache()
    assert failure is not None
    assert "memory" in failure
    runner.encode(segments[:4])
    assert runner.add(key(runner, 16_384)) is None


def test_costs_are_predicted_within_a_tenth(segments: list[Segment]) -> None:
    runner = made()
    runner.capture()
    runner.encode(segments * 2)
    runner.forget_stats()
    for _ in range(6):
        runner.encode(segments * 4)
    print(f"predicted against real: {runner.cost_error:.1%} off in the median")
    assert runner.cost_error is not None
    assert runner.cost_error < 0.10


def test_a_saturated_worker_keeps_four_fifths_of_its_throughput_while_it_changes() -> None:
    budgets = (64, 192, 320, 512, 640, 1024, 1536, 2048)  # every second one gives way
    encoder = EncoderConfig(model=MODEL, token_budgets=budgets)
    figures = measure_change(WorkerConfig(encoder=encoder, device="cuda"), seconds=3.0)
    print(figures)
    assert figures.num_captures == 4
    assert figures.during > 0.8 * figures.before
    assert figures.worst_distance < 2e-2
    assert figures.cost_error is not None
    assert figures.cost_error < 0.10
