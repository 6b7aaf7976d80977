"""Token budgets that suit a traffic: exact by dynamic programming, compared with trying everything."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import ToyAdapter

from encoder.adapters.registry import load_adapter
from encoder.budgets import affine_ms, choose_budgets, token_budgets
from encoder.config import EncoderConfig
from encoder.errors import ConfigError

COUNTS = st.dictionaries(st.integers(1, 12), st.floats(0.1, 10), min_size=1, max_size=6)


def expected_ms(counts: Mapping[int, float], budgets: tuple[int, ...], table: Mapping[int, float]) -> float:
    largest, total = max(budgets), 0.0
    for size, weight in counts.items():
        replays = (size - 1) // largest
        rest = size - replays * largest
        total += weight * (replays * table[largest] + min(table[budget] for budget in budgets if budget >= rest))
    return total


def least_ms(counts: Mapping[int, float], table: Mapping[int, float], most: int, room: int) -> float:
    return min(
        expected_ms(counts, budgets, table)
        for length in range(1, most + 1)
        for budgets in itertools.combinations(table, length)
        if sum(3 + budget for budget in budgets) <= room
    )


@settings(max_examples=150, deadline=None)
@given(COUNTS, st.integers(1, 4), st.integers(15, 60))
def test_budgets_at_sizes_are_the_best_there_are(counts: dict[int, float], most: int, room: int) -> None:
    budgets = choose_budgets(counts, max_graphs=most, max_bytes=room, bytes_of=lambda budget: 3 + budget)
    table = {size: affine_ms(size) for size in counts}
    assert len(budgets) <= most
    assert sum(3 + budget for budget in budgets) <= room
    assert expected_ms(counts, budgets, table) == pytest.approx(least_ms(counts, table, most, room))


@settings(max_examples=150, deadline=None)
@given(COUNTS, st.dictionaries(st.integers(1, 14), st.floats(0.5, 9), min_size=1, max_size=6), st.integers(1, 4))
def test_budgets_out_of_a_measured_table_are_the_best_there_are(
    counts: dict[int, float], table: dict[int, float], most: int
) -> None:
    budgets = choose_budgets(counts, cost_ms=table, max_graphs=most)
    assert expected_ms(counts, budgets, table) == pytest.approx(least_ms(counts, table, most, room=10**6))


def test_one_graph_serves_large_items_in_several_replays_when_those_are_rare() -> None:
    assert choose_budgets({1: 100, 9: 0.1}, cost_ms=lambda size: float(size), max_graphs=1) == (1,)
    assert choose_budgets({1: 1, 9: 100}, cost_ms=lambda size: 1.0 + size, max_graphs=1) == (9,)


def test_more_graphs_than_sizes_are_not_asked_for() -> None:
    assert choose_budgets({64: 1, 640: 2}, max_graphs=10) == (64, 640)


@pytest.mark.parametrize(
    ("counts", "changes"),
    [
        ({}, {}),
        ({0: 1.0}, {}),
        ({3: -1.0}, {}),
        ({3: math.nan}, {}),
        ({3: 1.0}, {"max_graphs": 0}),
        ({3: 1.0}, {"max_bytes": 5, "bytes_of": lambda budget: 6}),
    ],
)
def test_what_cannot_be_chosen_from_is_a_config_error(counts: dict[int, float], changes: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        choose_budgets(counts, **{"max_graphs": 2, **changes})  # type: ignore[arg-type]


def test_configured_traffic_moves_the_small_budgets_and_keeps_the_large_ones() -> None:
    config = EncoderConfig(model="tiny-minicpmv-2.6", traffic={64: 5.0, 640: 1.0})
    adapter = load_adapter(config)
    ladder = token_budgets(adapter, EncoderConfig(model="tiny-minicpmv-2.6"), ("packed",), "cuda")
    budgets = token_budgets(adapter, config, ("packed",), "cuda")
    assert [budget for budget in budgets if budget <= 640] == [64, 640]
    assert [budget for budget in budgets if budget > 640] == [budget for budget in ladder if budget > 640]


def test_named_budgets_win_over_traffic() -> None:
    config = EncoderConfig(model="tiny-minicpmv-2.6", traffic={640: 1.0}, token_budgets=(128,))
    assert token_budgets(load_adapter(config), config, ("packed",), "cuda") == (128,)


def test_traffic_for_several_ladders_is_refused() -> None:
    with pytest.raises(ConfigError, match="several combinations"):
        token_budgets(ToyAdapter(), EncoderConfig(model="toy", traffic={4: 1.0}), ("4", "odd"), "cpu")


@pytest.mark.parametrize("traffic", [{}, {0: 1.0}, {64: 0.0}, {64: math.inf}])
def test_traffic_without_meaning_is_refused(traffic: dict[int, float]) -> None:
    with pytest.raises(ValueError, match="positive"):
        EncoderConfig(model="toy", traffic=traffic)
