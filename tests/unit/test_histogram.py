"""Faded counts of item shapes: decay, bounds, travel."""

from __future__ import annotations

from collections import Counter

import pytest
from fakes import Clock
from hypothesis import given
from hypothesis import strategies as st

from cluster.planning.histogram import TrafficHistogram
from encoder.errors import ConfigError

A, B, C = (((1, 32, 32),), ((1, 28, 37), (1, 24, 43)), ((1, 10, 100),))


def histogram(clock: Clock, **changes: float) -> TrafficHistogram:
    return TrafficHistogram(now_s=clock, **{"half_life_s": 100.0, **changes})  # type: ignore[arg-type]


def test_an_item_counts_half_after_a_half_life() -> None:
    clock = Clock()
    traffic = histogram(clock)
    traffic.count(Counter([A, A, B]))
    clock.now += 100
    traffic.count(Counter([B]))
    assert traffic.counts() == pytest.approx({B: 1.5, A: 1.0})
    assert list(traffic.counts()) == [B, A]


def test_rates_are_those_of_steady_traffic_from_the_first_seconds_on() -> None:
    clock = Clock()
    traffic = histogram(clock)
    for second in range(1, 1001):
        clock.now += 1
        traffic.count(Counter([A, A, B]))
        if second in (10, 100, 1000):
            assert traffic.rates() == pytest.approx({A: 2.0, B: 1.0}, rel=0.01)


def test_years_of_silence_overflow_nothing() -> None:
    clock = Clock()
    traffic = histogram(clock)
    traffic.count(Counter([A]))
    for years in (1e-3, 1, 30):
        clock.now += years * 3e7
        traffic.count(Counter([B]))
        assert traffic.counts()[B] == pytest.approx(1.0)
    assert A not in traffic.counts()


def test_of_too_many_kinds_the_rarest_are_forgotten() -> None:
    clock = Clock()
    traffic = histogram(clock, max_entries=2)
    traffic.count(Counter([A] * 5 + [B] * 3 + [C] + [((1, 1, 1),)]))
    assert traffic.counts() == {A: 5.0, B: 3.0}


@given(st.lists(st.tuples(st.sampled_from([A, B, C]), st.floats(0, 500)), max_size=20))
def test_bytes_carry_counts_and_age_to_another_clock(
    events: list[tuple[tuple[tuple[int, int, int], ...], float]],
) -> None:
    clock = Clock()
    traffic = histogram(clock)
    for kind, pause_s in events:
        traffic.count(Counter([kind]))
        clock.now += pause_s
    copy = TrafficHistogram.from_bytes(traffic.to_bytes(), now_s=Clock(now=7.0))
    assert copy.counts() == pytest.approx(traffic.counts())
    assert copy.rates() == pytest.approx(traffic.rates())


@pytest.mark.parametrize("packed", [b"", b"\xc1", b"\x80", b"GIF89a", b"\x81\xb0encpool_histogram\x02"])
def test_other_bytes_are_a_config_error(packed: bytes) -> None:
    with pytest.raises(ConfigError, match="not a traffic histogram"):
        TrafficHistogram.from_bytes(packed)
