"""Which segments form a replay: nothing over capacity, nothing lost, nothing promoted to a looser key."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoder.packing import EagerCost, GraphTable, GraphView, plan_replay, take
from encoder.types import AxisKeys, Capacity, GraphKey, Grid, MissReason, SegmentShape

MISSING_KEY = ("huge",)


def measure(grid: Grid) -> SegmentShape:
    return SegmentShape(grid=grid, num_patches=grid[1] * grid[2], num_tokens=grid[1])


def axis_choices(grid: Grid) -> list[AxisKeys]:
    """Small grids have a key of their own; everything below 50 rows goes to "any"."""
    if grid[1] >= 50:
        return [MISSING_KEY] if grid[1] >= 90 else []
    return [("small",), ("any",)] if grid[1] <= 4 else [("any",)]


def view(axis_key: str, budget: int, cost_ms: float) -> GraphView:
    capacity = Capacity(patches=budget * 8, segments=budget // 2, tokens=budget, longest=budget * 6)
    key = GraphKey(encoder="toy", path="image", axis_keys=(axis_key,), token_budget=budget)
    return GraphView(key=key, capacity=capacity, cost_ms=cost_ms)


VIEWS = [view("small", 8, 1.0), view("small", 16, 1.5), view("any", 16, 2.0), view("any", 64, 5.0)]
grids = st.tuples(st.just(1), st.integers(1, 100), st.integers(1, 10))
pending_lists = st.lists(grids.map(measure), min_size=1, max_size=60)


def table(views: list[GraphView] = VIEWS) -> GraphTable:
    return GraphTable(views, axis_choices, measure, {MISSING_KEY: MissReason.CAPTURE_FAILED})


@given(
    st.lists(st.one_of(grids, st.tuples(st.just(1), st.integers(1, 3), st.integers(1, 3))).map(measure), max_size=60),
    st.builds(
        Capacity,
        patches=st.integers(0, 400),
        segments=st.integers(0, 9),
        tokens=st.integers(0, 90),
        longest=st.integers(0, 300),
    ),
)
def test_take_never_exceeds_a_capacity(shapes: list[SegmentShape], capacity: Capacity) -> None:
    taken = [shapes[index] for index in take(shapes, capacity)]
    assert len(taken) <= capacity.segments
    assert sum(shape.num_patches for shape in taken) <= capacity.patches
    assert sum(shape.num_tokens for shape in taken) <= capacity.tokens
    assert all(shape.num_patches <= capacity.longest for shape in taken)


@given(pending_lists)
def test_every_segment_runs_once_and_within_capacity(shapes: list[SegmentShape]) -> None:
    waiting = list(range(len(shapes)))
    served: list[int] = []
    graphs = {view.key: view.capacity for view in VIEWS}
    while waiting:
        replay = plan_replay([shapes[index] for index in waiting], table(), eager_patches=200)
        assert 0 in replay.taken, "the oldest segment is never passed over"
        chosen = [waiting[index] for index in replay.taken]
        assert len(set(chosen)) == len(chosen)
        taken = [shapes[index] for index in chosen]
        if replay.key is None:
            assert replay.reason is not None
            assert sum(shape.num_patches for shape in taken) <= max(200, taken[0].num_patches)
        else:
            capacity = graphs[replay.key]
            assert take(taken, capacity) == tuple(range(len(taken)))
            assert all(axis_choices(shape.grid)[0] == replay.key.axis_keys for shape in taken if shape.num_patches < 40)
        served += chosen
        waiting = [index for index in waiting if index not in chosen]
    assert sorted(served) == list(range(len(shapes)))


@pytest.mark.parametrize(("num_segments", "budget"), [(1, 16), (2, 16), (4, 16), (5, 64), (8, 64)])
def test_budget_that_serves_the_whole_group_soonest_wins(num_segments: int, budget: int) -> None:
    """Replays of 16 hold two of 8 rows in 2 ms, those of 64 hold eight in 5 ms: two of those, or one of these."""
    replay = plan_replay([measure((1, 8, 5))] * num_segments, table(), eager_patches=100)
    assert replay.key is not None
    assert replay.key.token_budget == budget


def test_a_remainder_is_not_left_over_for_a_slightly_better_rate() -> None:
    """Nine run in one replay of 1.5 ms a segment, although eight would cost less a segment: the ninth pays for it."""
    nine, eight, one = view("any", 72, 14.0), view("any", 64, 12.1), view("any", 8, 2.3)
    replay = plan_replay([measure((1, 8, 5))] * 9, table([one, eight, nine]), eager_patches=100)
    assert replay.key == nine.key


def test_segments_are_not_promoted_to_a_looser_key() -> None:
    shapes = [measure((1, 8, 5)), measure((1, 2, 2)), measure((1, 8, 5))]
    replay = plan_replay(shapes, table(), eager_patches=100)
    assert replay.taken == (0, 2)


@pytest.mark.parametrize(
    ("grid", "reason"),
    [
        ((1, 60, 1), MissReason.NO_AXIS_KEY),
        ((1, 40, 10), MissReason.TOO_LARGE),
        ((1, 95, 1), MissReason.CAPTURE_FAILED),
    ],
)
def test_what_no_graph_holds_runs_eagerly_with_its_reason(grid: Grid, reason: MissReason) -> None:
    assert plan_replay([measure(grid)], table(), eager_patches=10).reason is reason


class Forgetful(dict[Any, Any]):
    """Another thread clears it at the worst moment."""

    def __setitem__(self, key: object, value: object) -> None:
        super().__setitem__(key, value)
        self.clear()


def test_what_another_thread_forgets_is_told_all_the_same() -> None:
    """Threads that admit items share a table; the one that finds it full begins anew."""
    shared = table()
    shared._homes, shared._choices = Forgetful(), Forgetful()
    assert shared.home((1, 2, 2)) == (("small",), None)
    assert shared.choices((1, 2, 2)) == [("small",), ("any",)]


def test_a_graph_slower_than_eager_for_its_fill_is_not_used() -> None:
    """One small segment in a graph for 16 tokens costs 2 ms; eagerly 1 ms and 0.01 ms a patch."""
    eager = EagerCost(base_ms=1.0, ms_per_patch=0.01)
    slow = GraphTable(VIEWS, axis_choices, measure, eager=eager)
    few, many = [measure((1, 5, 5))], [measure((1, 8, 10))] * 1
    replay = plan_replay(few, slow, eager_patches=100)
    assert (replay.key, replay.reason, replay.taken) == (None, MissReason.SLOWER_THAN_EAGER, (0,))
    assert plan_replay(many, slow, eager_patches=100).key == VIEWS[2].key


def test_replays_that_slow_down_do_not_make_eager_look_faster() -> None:
    """Clocks fall under load for eager runs as well."""
    eager = EagerCost(base_ms=1.0, ms_per_patch=0.01)
    drifting = GraphTable([view("any", 16, 2.0)], axis_choices, measure, eager=eager)
    shapes = [measure((1, 8, 10))]
    for _ in range(200):
        drifting.correct(VIEWS[2].key, elapsed_ms=4.0, num_patches=128)
    assert drifting.views[0].cost_ms == pytest.approx(4.0, rel=1e-3)
    assert plan_replay(shapes, drifting, eager_patches=100).key == VIEWS[2].key


def test_a_large_graph_that_slows_down_more_than_small_ones_is_not_replaced_by_eager_runs() -> None:
    """At the power limit of a chip, full replays fall behind more than short ones: measured 1.3 and 1.0 times."""
    small, large = view("any", 16, 2.0), view("any", 64, 5.0)
    mixed = GraphTable([small, large], axis_choices, measure, eager=EagerCost(base_ms=0.1, ms_per_patch=0.0095))
    for _ in range(200):
        mixed.correct(large.key, elapsed_ms=6.5, num_patches=470)
        for _ in range(4):
            mixed.correct(small.key, elapsed_ms=2.0, num_patches=128)
    replay = plan_replay([measure((1, 8, 8))] * 7 + [measure((1, 7, 2))], mixed, eager_patches=1000)
    assert (replay.key, replay.reason) == (large.key, None)


@given(st.floats(0.0, 1.0), st.floats(0.0, 0.01))
def test_no_guess_makes_an_eager_run_replace_a_full_replay(base_ms: float, ms_per_patch: float) -> None:
    """The same rows pass through the same kernels."""
    hopeful = GraphTable(VIEWS, axis_choices, measure, eager=EagerCost(base_ms=base_ms, ms_per_patch=ms_per_patch))
    full = [measure((1, 16, 8))] * 4
    assert plan_replay(full, hopeful, eager_patches=1000).key == VIEWS[3].key


def test_what_a_half_full_replay_takes_says_nothing_of_a_full_one() -> None:
    learning = table([view("any", 16, 2.0)])
    for _ in range(50):
        assert learning.correct(VIEWS[2].key, elapsed_ms=1.5, num_patches=64) <= 2.0
    assert learning.views[0].cost_ms == 2.0
    learning.correct(VIEWS[2].key, elapsed_ms=1.5, num_patches=128)
    assert learning.views[0].cost_ms < 2.0


def test_without_graphs_everything_runs_eagerly() -> None:
    without = table([])
    assert without.correct(VIEWS[2].key, elapsed_ms=1.5, num_patches=8) == 1.5, "of a graph that went meanwhile"
    replay = plan_replay([measure((1, 2, 2))] * 3, without, eager_patches=8)
    assert (replay.key, replay.reason, replay.taken) == (None, MissReason.GRAPHS_OFF, (0, 1))


def test_eager_runs_join_what_has_the_same_axis_keys() -> None:
    """An encoder of two paths has no run that holds both."""
    shapes = [measure((1, 8, 2)), measure((1, 2, 2)), measure((1, 9, 2)), measure((1, 3, 2))]
    assert plan_replay(shapes, table([]), eager_patches=100).taken == (0, 2)
    assert plan_replay(shapes[1:], table([]), eager_patches=100).taken == (0, 2)
