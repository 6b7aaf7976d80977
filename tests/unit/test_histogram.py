"""Faded counts of item shapes: decay, merging, bounds, travel."""

from __future__ import annotations

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
    traffic.observe([A, A, B])
    clock.now += 100
    traffic.observe([B])
    assert traffic.counts() == pytest.approx({B: 1.5, A: 1.0})
    assert list(traffic.counts()) == [B, A]


def test_rates_are_those_of_steady_traffic_from_the_first_seconds_on() -> None:
    clock = Clock()
    traffic = histogram(clock)
    for second in range(1, 1001):
        clock.now += 1
        traffic.observe([A, A, B])
        if second in (10, 100, 1000):
            assert traffic.rates() == pytest.approx({A: 2.0, B: 1.0}, rel=0.01)


def test_years_of_silence_overflow_nothing() -> None:
    clock = Clock()
    traffic = histogram(clock)
    traffic.observe([A])
    for years in (1e-3, 1, 30):
        clock.now += years * 3e7
        traffic.observe([B])
        assert traffic.counts()[B] == pytest.approx(1.0)
    assert A not in traffic.counts()


def test_of_too_many_kinds_the_rarest_are_counted_together() -> None:
    clock = Clock()
    traffic = histogram(clock, max_entries=2)
    traffic.observe([A] * 5 + [B] * 3 + [C] + [((1, 1, 1),)])
    assert traffic.counts() == {A: 5.0, B: 3.0}
    assert traffic.unknown == 2.0


def test_merged_histograms_count_what_one_would_have_counted() -> None:
    clock, elsewhere = Clock(), Clock(now=5.0)  # another machine's clock starts elsewhere
    one, other, both = histogram(clock), histogram(elsewhere), histogram(clock)
    for kinds in ([A, B], [B], [C, C, A]):
        one.observe(kinds)
        other.observe(reversed(kinds))
        both.observe([*kinds, *kinds])
        clock.now += 30
        elsewhere.now += 30
    one.merge(other)
    assert one.counts() == pytest.approx(both.counts())
    assert one.rates() == pytest.approx(both.rates())


def test_other_half_lives_do_not_merge() -> None:
    with pytest.raises(ValueError, match="do not add up"):
        histogram(Clock()).merge(histogram(Clock(), half_life_s=5.0))


@given(st.lists(st.tuples(st.sampled_from([A, B, C]), st.floats(0, 500)), max_size=20))
def test_bytes_carry_counts_and_age_to_another_clock(
    events: list[tuple[tuple[tuple[int, int, int], ...], float]],
) -> None:
    clock = Clock()
    traffic = histogram(clock)
    for kind, pause_s in events:
        traffic.observe([kind])
        clock.now += pause_s
    copy = TrafficHistogram.from_bytes(traffic.to_bytes(), now_s=Clock(now=7.0))
    assert copy.counts() == pytest.approx(traffic.counts())
    assert copy.rates() == pytest.approx(traffic.rates())


@pytest.mark.parametrize("packed", [b"", b"\xc1", b"\x80", b"GIF89a", b"\x81\xb0encpool_histogram\x02"])
def test_other_bytes_are_a_config_error(packed: bytes) -> None:
    with pytest.raises(ConfigError, match="not a traffic histogram"):
        TrafficHistogram.from_bytes(packed)
