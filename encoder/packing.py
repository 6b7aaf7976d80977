"""Which pending segments form the next replay, and of which graph. Pure functions, free of torch.

Segments are grouped by the tightest captured axis keys that hold them and never promoted to looser ones; the oldest
segment's group goes first. Within a group the budget wins that makes the whole group, this replay and the rest, take
the least time. A segment that no graph holds runs eagerly, and so does one whose graph would take longer than that; an
eager run joins segments that have the same axis keys to choose from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from encoder.cost_book import CostBook
from encoder.types import AxisKeys, Capacity, GraphKey, Grid, MissReason, SegmentShape

EAGER_MARGIN = 0.85
"""Eager runs must be predicted this much faster than a replay before they replace it: a fit is not a measurement."""

MAX_REMEMBERED_GRIDS = 65_536

LOOK_AHEAD = 256
"""Pending segments that a plan considers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphView:
    """What others need to know of a captured graph."""

    key: GraphKey
    capacity: Capacity
    cost_ms: float  # one replay, measured; hardly depends on how full it is
    num_bytes: int = 0  # device memory that it alone takes: inputs, output, the recording
    shared_bytes: int = 0  # scratch from the pool that all graphs of a worker share: only the largest one counts


@dataclass(frozen=True, slots=True, kw_only=True)
class EagerCost:
    """What an eager run takes, fitted to measured ones."""

    base_ms: float
    ms_per_patch: float
    measured: bool = True  # False: guessed from one run; no eager run replaces a slower replay by such a guess

    def predict_ms(self, num_patches: int) -> float:
        """Milliseconds for segments of so many patches together."""
        return self.base_ms + self.ms_per_patch * num_patches


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Segments to run together: indices into what was pending, and the graph that takes them."""

    key: GraphKey | None  # None: eagerly
    taken: tuple[int, ...]
    reason: MissReason | None = None  # why it runs eagerly


def take(shapes: Sequence[SegmentShape], capacity: Capacity) -> tuple[int, ...]:
    """Indices of the segments that fit together, oldest first; later ones fill what an earlier one leaves over."""
    taken = []
    patches, segments, tokens = capacity.patches, capacity.segments, capacity.tokens
    for index, shape in enumerate(shapes):
        if segments == 0:
            break
        if shape.num_patches <= patches and shape.num_tokens <= tokens and shape.num_patches <= capacity.longest:
            taken.append(index)
            patches -= shape.num_patches
            tokens -= shape.num_tokens
            segments -= 1
    return tuple(taken)


class GraphTable:
    """The graphs a worker holds, looked up by grid, which any thread may do; one thread corrects their costs."""

    def __init__(
        self,
        views: Iterable[GraphView],
        axis_choices: Callable[[Grid], list[AxisKeys]],
        measure: Callable[[Grid], SegmentShape],
        missing: Mapping[AxisKeys, MissReason] | None = None,
        eager: EagerCost | None = None,
        book: CostBook | None = None,
    ) -> None:
        """`missing` tells why axis keys that were asked for have no graph; `book` knows more of costs than the views.

        With `eager`, a replay that would take longer than the same segments eagerly is not made.
        """
        self._eager = eager
        self.book = book or CostBook()
        self._axis_choices = axis_choices
        self._measure = measure
        self._missing = dict(missing or {})
        self.ladders: dict[AxisKeys, list[GraphView]] = {}
        for view in sorted(views, key=lambda view: view.key.token_budget):
            self.book.note(view.key, view.cost_ms)
            known = replace(view, cost_ms=self.book.cost_ms(view.key) or view.cost_ms)
            self.ladders.setdefault(view.key.axis_keys, []).append(known)
        self._homes: dict[Grid, tuple[AxisKeys | None, MissReason | None]] = {}
        self._choices: dict[Grid, list[AxisKeys]] = {}

    @property
    def views(self) -> tuple[GraphView, ...]:
        """Every graph, by axis keys and budget."""
        return tuple(view for ladder in self.ladders.values() for view in ladder)

    def correct(self, key: GraphKey, elapsed_ms: float, num_patches: int) -> float:
        """Learn from a replay of so many useful rows; returns what was predicted for it."""
        ladder = self.ladders.get(key.axis_keys, [])
        index = next((index for index, view in enumerate(ladder) if view.key == key), None)
        if index is None:
            return elapsed_ms  # the graph went meanwhile
        view = ladder[index]
        predicted_ms = self.book.learn(key, elapsed_ms, min(1.0, num_patches / view.capacity.patches))
        ladder[index] = replace(view, cost_ms=self.book.cost_ms(key) or view.cost_ms)
        return predicted_ms

    def correct_eager(self, elapsed_ms: float, num_patches: int) -> None:
        """Learn from an eager run, where one was measured before."""
        if self.eager:
            self.book.learn_eager(self.eager.predict_ms(num_patches), elapsed_ms)

    @property
    def eager(self) -> EagerCost | None:
        """What eager runs take now; None where nobody measured one."""
        factor = self.book.drift * self.book.eager_factor
        return self._eager and EagerCost(
            base_ms=factor * self._eager.base_ms, ms_per_patch=factor * self._eager.ms_per_patch
        )

    def eager_instead_ms(self, view: GraphView, num_patches: int) -> float:
        """What so many patches would take now without this graph; infinite where nobody measured it.

        Large replays slow down more than small ones when clocks fall, so it is this graph's own slowing that counts.
        And the same rows pass through the same kernels: all that can be saved is padding, twice if all were attention.
        """
        if self._eager is None:
            return math.inf
        slowed = self.book.slowed(view.key) * self.book.eager_factor
        fullness = min(1.0, num_patches / view.capacity.patches)
        return max(slowed * self._eager.predict_ms(num_patches), fullness**2 * view.cost_ms)

    def home(self, grid: Grid) -> tuple[AxisKeys | None, MissReason | None]:
        """The tightest axis keys with a graph that holds this grid, or None and the reason."""
        home = self._homes.get(grid)
        if home is None:
            if len(self._homes) >= MAX_REMEMBERED_GRIDS:
                self._homes.clear()
            home = self._homes[grid] = self._find_home(grid)
        return home

    def choices(self, grid: Grid) -> list[AxisKeys]:
        """Axis keys whose graphs may hold this grid, captured or not, the tightest first."""
        choices = self._choices.get(grid)
        if choices is None:
            if len(self._choices) >= MAX_REMEMBERED_GRIDS:
                self._choices.clear()
            choices = self._choices[grid] = self._axis_choices(grid)
        return choices

    def _find_home(self, grid: Grid) -> tuple[AxisKeys | None, MissReason | None]:
        shape = self._measure(grid)
        choices = self.choices(grid)
        for keys in choices:
            if any(view.capacity.admits(shape) for view in self.ladders.get(keys, ())):
                return keys, None
        failed = next((self._missing[keys] for keys in choices if keys in self._missing), None)
        if failed is not None:
            return None, failed
        if not self.ladders:
            return None, MissReason.GRAPHS_OFF
        return None, MissReason.TOO_LARGE if choices else MissReason.NO_AXIS_KEY


def plan_replay(pending: Sequence[SegmentShape], table: GraphTable, *, eager_patches: int) -> Replay:
    """Choose the next replay for `pending`, oldest first; at least the oldest segment is in it.

    `eager_patches` is what one eager run may join where no graph holds its segments; a longer segment runs alone.
    Where eager is faster than a graph that would hold them, the run has what the graph would have had.
    """
    window = pending[:LOOK_AHEAD]
    keys, reason = table.home(window[0].grid)
    group = [index for index, shape in enumerate(window) if table.home(shape.grid) == (keys, reason)]
    if keys is None:
        choices = table.choices(window[0].grid)
        group = [index for index in group if table.choices(window[index].grid) == choices]
        shapes = [window[index] for index in group]
        room = Capacity(
            patches=max(eager_patches, shapes[0].num_patches),
            segments=len(shapes),
            tokens=sum(shape.num_tokens for shape in shapes),
            longest=max(eager_patches, shapes[0].num_patches),
        )
        return Replay(key=None, taken=tuple(group[index] for index in take(shapes, room)), reason=reason)

    shapes = [window[index] for index in group]
    ladder = table.ladders[keys]
    options = [(view, take(shapes, view.capacity)) for view in ladder if view.capacity.admits(shapes[0])]
    assert options, "home() only names axis keys whose graphs admit the grid"
    total = _Amount.of(shapes)

    def cost_ms(option: tuple[GraphView, tuple[int, ...]]) -> float:
        view, taken = option
        return view.cost_ms + _rest_ms(total - _Amount.of([shapes[index] for index in taken]), ladder)

    view, taken = min(options, key=cost_ms)
    chosen = tuple(group[index] for index in taken)
    num_patches = sum(window[index].num_patches for index in chosen)
    if table.eager_instead_ms(view, num_patches) < EAGER_MARGIN * view.cost_ms:
        return Replay(key=None, taken=chosen, reason=MissReason.SLOWER_THAN_EAGER)
    return Replay(key=view.key, taken=chosen)


@dataclass(frozen=True, slots=True)
class _Amount:
    """How much a group of segments asks for."""

    patches: int
    segments: int
    tokens: int

    @classmethod
    def of(cls, shapes: Sequence[SegmentShape]) -> _Amount:
        return cls(sum(shape.num_patches for shape in shapes), len(shapes), sum(shape.num_tokens for shape in shapes))

    def __sub__(self, other: _Amount) -> _Amount:
        return _Amount(self.patches - other.patches, self.segments - other.segments, self.tokens - other.tokens)

    def share_of(self, capacity: Capacity) -> float:
        """Of the scarcest room; above 1 it doesn't fit."""
        return max(self.patches / capacity.patches, self.segments / capacity.segments, self.tokens / capacity.tokens)


def _rest_ms(rest: _Amount, ladder: Sequence[GraphView]) -> float:
    """What the rest will take at best: one replay if one has the room, else a share of the largest graph's time."""
    if rest.segments == 0:
        return 0.0
    fitting = [view.cost_ms for view in ladder if rest.share_of(view.capacity) <= 1]
    largest = ladder[-1]
    return min(fitting) if fitting else largest.cost_ms * rest.share_of(largest.capacity)
