"""What runs are predicted to take: learned from what they took, and kept."""

from __future__ import annotations

import random

import pytest
from fakes import graph

from encoder.cost_book import CostBook

KEY = graph().key


def book(measured_ms: float = 10.0) -> CostBook:
    made = CostBook()
    made.note(KEY, measured_ms)
    return made


def test_costs_follow_what_replays_take_and_drift_tells_by_how_much() -> None:
    made = book()
    for _ in range(200):
        made.learn(KEY, 13.0, 1.0)
    assert made.cost_ms(KEY) == pytest.approx(13.0, rel=0.01)
    assert made.drift == pytest.approx(1.3, rel=0.01)
    made.note(KEY, 10.0)  # captured anew
    assert made.cost_ms(KEY) == pytest.approx(13.0, rel=0.01)


def test_replays_that_are_not_full_take_less_and_do_not_make_full_ones_look_cheaper() -> None:
    """Pad rows save a quarter of the time: half full replays take seven eighths."""
    made, rng = book(), random.Random(0)
    for _ in range(600):
        fullness = rng.choice([0.3, 0.5, 0.97])
        made.learn(KEY, 10.0 * (1 - 0.25 * (1 - fullness)), fullness)
    assert made.cost_ms(KEY) == pytest.approx(10.0, rel=0.01)
    assert made.slack == pytest.approx(0.25, abs=0.02)
    made.forget_errors()
    for _ in range(20):
        made.learn(KEY, 8.75, 0.5)
    assert made.error == pytest.approx(0.0, abs=0.01)


def test_the_error_is_a_median_over_the_latest_runs() -> None:
    made = book()
    for _ in range(7):
        made.learn(KEY, 8.0, 0.5)
    assert made.error is None  # too few to say
    made.learn(KEY, 1000.0, 0.5)  # one that was interrupted
    assert made.error is not None
    assert made.error < 0.3


def test_eager_runs_correct_their_own_prediction_and_one_slow_run_hardly_counts() -> None:
    made = book()
    made.learn_eager(10.0, 1000.0)
    assert made.eager_factor == pytest.approx(1.05)
    for _ in range(200):
        made.learn_eager(10.0 * made.eager_factor, 20.0)
    assert made.eager_factor == pytest.approx(2.0, rel=0.02)
