"""Capture axes: combinations, checks, failures; on the static backend with a toy encoder of two axes."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from toy import ToyAdapter, ToyModel, toy_segment, toy_tokens

from encoder.adapters.base import Segment
from encoder.budgets import graph_keys
from encoder.config import EncoderConfig
from encoder.errors import ConfigError
from encoder.runner import EncoderRunner
from encoder.types import MissReason


def config(**changes: object) -> EncoderConfig:
    return EncoderConfig.model_validate({"model": "toy", **changes})


def toy_runner(adapter: ToyAdapter, model: ToyModel | None = None, **changes: object) -> EncoderRunner:
    return EncoderRunner(adapter, model or ToyModel(), config(**changes), torch.device("cpu"), torch.float32)


def test_a_graph_exists_for_each_combination_and_budget_largest_first() -> None:
    keys = graph_keys(ToyAdapter(), config(token_budgets=(2, 8, 4)), "toy@float32", "cpu")
    assert len(keys) == 2 * 2 * 3
    assert {key.axis_keys for key in keys} == {("4", "odd"), ("4", "even"), ("8", "odd"), ("8", "even")}
    assert [key.token_budget for key in keys] == sorted((key.token_budget for key in keys), reverse=True)


def test_budgets_may_differ_by_axis_key() -> None:
    keys = graph_keys(ToyAdapter(), config(token_budgets={"8": (16,)}), "toy@float32", "cpu")
    assert {key.token_budget for key in keys if key.axis_keys[0] == "8"} == {16}
    assert {key.token_budget for key in keys if key.axis_keys[0] == "4"} == {4, 8}  # inferred


@pytest.mark.parametrize(
    ("adapter", "changes", "message"),
    [
        (ToyAdapter(widths=()), {}, "axis 'width' has no keys"),
        (ToyAdapter(), {"token_budgets": ()}, "no token budgets"),
        (ToyAdapter(), {"token_budgets": (0, 4)}, "budgets are positive"),
        (ToyAdapter(), {"token_budgets": (1, 4)}, "room for two rows"),
        (ToyAdapter(), {"token_budgets": {"16": (4,)}}, r"\['16'\]"),
        (ToyAdapter(), {"token_budgets": (4, 8), "max_segments_per_graph": 5}, "smallest token budget is 4"),
    ],
)
def test_axes_and_budgets_that_cannot_work_are_refused(
    adapter: ToyAdapter, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        toy_runner(adapter, **changes).capture()


def test_many_graphs_warn_with_their_memory(caplog: pytest.LogCaptureFixture) -> None:
    runner = toy_runner(ToyAdapter(widths=[str(width) for width in range(1, 18)]))
    with caplog.at_level(logging.WARNING):
        report = runner.capture()
    assert report.num_graphs == 68
    assert "68 graphs" in caplog.text
    assert "GiB" in caplog.text


def test_each_segment_runs_in_the_graph_of_its_tightest_keys() -> None:
    adapter = ToyAdapter()
    runner = toy_runner(adapter)
    runner.capture()
    segments = [toy_segment(adapter, rows, columns) for rows, columns in ((3, 4), (2, 4), (2, 7), (1, 2), (4, 5))]
    for tokens, segment in zip(runner.encode(segments), segments, strict=True):
        assert torch.equal(tokens, toy_tokens(segment))
    assert runner.stats.hit_rate == 1.0
    assert {key.axis_keys for key in runner.stats.uses} == {("4", "odd"), ("4", "even"), ("8", "even")}


def test_a_capture_that_fails_leaves_the_others_and_is_counted() -> None:
    adapter = ToyAdapter()
    runner = toy_runner(adapter, ToyModel(failing_budgets=(8,)))
    report = runner.capture()
    assert report.num_graphs == 4
    assert len(report.failed) == 4
    fitting, too_large = toy_segment(adapter, 3, 4), toy_segment(adapter, 6, 4)
    for tokens, segment in zip(runner.encode([fitting, too_large]), [fitting, too_large], strict=True):
        assert torch.equal(tokens, toy_tokens(segment))
    assert runner.stats.hits == 1
    assert runner.stats.misses == {MissReason.CAPTURE_FAILED: 1}


def test_a_dropped_graph_sends_its_segments_elsewhere() -> None:
    adapter = ToyAdapter()
    runner = toy_runner(adapter)
    runner.capture()
    for view in runner.graph_views():
        if view.key.axis_keys == ("4", "odd"):
            runner.drop(view.key)
    segment = toy_segment(adapter, 3, 4)
    assert torch.equal(runner.encode([segment])[0], toy_tokens(segment))
    assert {key.axis_keys for key in runner.stats.uses} == {("8", "odd")}


def test_without_graphs_everything_runs_eagerly_and_says_so() -> None:
    adapter = ToyAdapter()
    runner = toy_runner(adapter, graphs=False)
    assert runner.capture().num_graphs == 0
    segment = toy_segment(adapter, 3, 9)
    assert torch.equal(runner.encode([segment])[0], toy_tokens(segment))
    assert runner.stats.misses == {MissReason.GRAPHS_OFF: 1}


def test_launches_that_fail_leave_room_for_others() -> None:
    """A failed launch gives its staging slot back: there are only three."""
    adapter = ToyAdapter()
    runner = toy_runner(adapter)
    runner.capture()
    segment = toy_segment(adapter, 3, 4)
    replay = runner.plan([segment.shape])
    damaged = Segment(shape=segment.shape, patches_PC=np.zeros((1, 9), dtype=np.uint8))
    for _ in range(5):
        with pytest.raises(ValueError, match="broadcast"):
            runner.submit([damaged], replay)
    assert torch.equal(runner.encode([segment])[0], toy_tokens(segment))
