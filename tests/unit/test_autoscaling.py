"""How many workers a load asks for: sentences of it, and what must hold for any load."""

from __future__ import annotations

import math
from itertools import pairwise

from hypothesis import example, given, settings
from hypothesis import strategies as st

from cluster.groups import AutoscaleConfig
from cluster.lifecycle.autoscaling import MARGIN, MOST_GROWTH, Autoscaler, LoadSample

LIMITS = AutoscaleConfig(min_workers=1, max_workers=8, target_queue_ms=100, up_after_s=5, down_after_s=60)


def run(loads: list[tuple[float, bool]], num_workers: int = 1, limits: AutoscaleConfig = LIMITS) -> list[int]:
    """The number wanted after each second, for (milliseconds in flight, whether work was refused)."""
    scaler, numbers = Autoscaler(limits), []
    for second, (in_flight_ms, refused) in enumerate(loads):
        wanted = scaler.wanted(
            LoadSample(time_s=float(second), in_flight_ms=in_flight_ms, refused=refused), num_workers
        )
        if wanted != num_workers:
            scaler.changed()
        num_workers = wanted
        numbers.append(num_workers)
    return numbers


def steady(in_flight_ms: float, seconds: int, *, refused: bool = False) -> list[tuple[float, bool]]:
    return [(in_flight_ms, refused)] * seconds


def test_a_long_queue_brings_workers_after_a_while_and_a_short_peak_brings_none() -> None:
    assert run(steady(390.0, 20))[:7] == [1, 1, 1, 1, 1, 2, 2]
    assert run(steady(390.0, 20))[-1] == 4
    peaks = [load for _ in range(10) for load in [*steady(390.0, 4), *steady(90.0, 1)]]
    assert set(run(peaks)) == {1}


def test_refused_work_brings_a_worker_though_the_queue_looks_short() -> None:
    assert run(steady(10.0, 10, refused=True))[-1] == 2


def test_idle_workers_go_one_by_one_each_after_the_whole_pause() -> None:
    numbers = run(steady(0.0, 200), num_workers=3)
    assert (numbers[59], numbers[60], numbers[120], numbers[121], numbers[199]) == (3, 2, 2, 1, 1)


def test_one_busy_moment_keeps_the_workers() -> None:
    assert run([*steady(0.0, 50), *steady(280.0, 1), *steady(0.0, 50)], num_workers=3)[-1] == 3


loads = st.lists(st.tuples(st.floats(min_value=0, max_value=5_000), st.booleans()), min_size=1, max_size=120)
limits = st.builds(
    lambda least, more, up, down: AutoscaleConfig(
        min_workers=least, max_workers=least + more, target_queue_ms=100, up_after_s=up, down_after_s=down
    ),
    st.integers(1, 5),
    st.integers(0, 20),
    st.floats(0, 8),
    st.floats(0, 15),
)


@given(loads=loads, limits=limits)
def test_whatever_comes_the_number_stays_within_its_limits_and_grows_by_steps(
    loads: list[tuple[float, bool]], limits: AutoscaleConfig
) -> None:
    numbers = [limits.min_workers, *run(loads, limits.min_workers, limits)]
    assert all(limits.min_workers <= number <= limits.max_workers for number in numbers)
    assert all(before - 1 <= after <= max(before + 1, MOST_GROWTH * before) for before, after in pairwise(numbers))


@given(loads=loads, limits=limits)
def test_no_worker_goes_sooner_than_the_pause_after_the_last_change(
    loads: list[tuple[float, bool]], limits: AutoscaleConfig
) -> None:
    numbers = [limits.min_workers, *run(loads, limits.min_workers, limits)]
    changes = [second for second, (before, after) in enumerate(pairwise(numbers)) if before != after]
    for last, change in pairwise([0, *changes]):
        if numbers[change + 1] < numbers[change]:
            assert change - last >= limits.down_after_s


@settings(max_examples=50)
@given(in_flight_ms=st.floats(0, 5_000), limits=limits, num_workers=st.integers(1, 25))
@example(
    in_flight_ms=0.0,
    limits=AutoscaleConfig(min_workers=1, max_workers=19, target_queue_ms=100, up_after_s=0, down_after_s=0.03125),
    num_workers=19,
)
def test_a_steady_load_settles_on_one_number_that_holds_it(
    in_flight_ms: float, limits: AutoscaleConfig, num_workers: int
) -> None:
    num_workers = min(max(num_workers, limits.min_workers), limits.max_workers)
    # It looks once a second, and a pause ends with the first look after it.
    longest_s = (math.ceil(limits.down_after_s) + 1) * 25 + (math.ceil(limits.up_after_s) + 1) * 10
    numbers = run(steady(in_flight_ms, longest_s), num_workers, limits)
    assert sum(before != after for before, after in pairwise(numbers)) <= 25
    last = numbers[-1]
    assert last == limits.max_workers or in_flight_ms <= last * limits.target_queue_ms
    assert last == limits.min_workers or MARGIN * in_flight_ms > (last - 1) * limits.target_queue_ms
    assert all(up <= down for up, down in pairwise(numbers)) or all(up >= down for up, down in pairwise(numbers))
    assert math.isfinite(last)
