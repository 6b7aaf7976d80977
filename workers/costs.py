"""What an item will cost on a given set of graphs, in milliseconds. Pure arithmetic, shared by router and worker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from encoder.packing import GraphTable, GraphView
from encoder.types import AxisKeys, Capacity, GraphKey, Grid, SegmentShape

MAX_REMEMBERED_QUOTES = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class Quote:
    """An item's cost on one worker."""

    cost_ms: float
    key: GraphKey | None  # the graph that takes most of its patches; None: all of it runs eagerly
    held: bool  # whether graphs take every segment


class CostTable:
    """Quotes items from a worker's graphs and their measured costs."""

    def __init__(
        self,
        graphs: Iterable[GraphView],
        *,
        axis_choices: Callable[[Grid], list[AxisKeys]],
        measure: Callable[[Grid], SegmentShape],
        eager_ms_per_patch: float,
        eager_base_ms: float = 0.0,
    ) -> None:
        """`eager_base_ms`: of the eager run that an item with any eager segment needs."""
        self._table = GraphTable(graphs, axis_choices, measure)
        self._measure = measure
        self.eager_ms_per_patch = eager_ms_per_patch
        self._eager_base_ms = eager_base_ms
        self._quotes: dict[tuple[Grid, ...], Quote] = {}

    @property
    def ladders(self) -> Mapping[AxisKeys, Sequence[GraphView]]:
        """The graphs by axis keys, each ladder by budget."""
        return self._table.ladders

    def quote(self, grids: tuple[Grid, ...]) -> Quote:
        """Cost of an item's segments, each at its share of the graph that serves it most cheaply."""
        quote = self._quotes.get(grids)
        if quote is None:
            if len(self._quotes) >= MAX_REMEMBERED_QUOTES:
                self._quotes.clear()
            quote = self._quotes[grids] = self._quote(grids)
        return quote

    def _quote(self, grids: tuple[Grid, ...]) -> Quote:
        cost_ms, held, patches_by_key = 0.0, True, Counter[GraphKey]()
        for grid, count in Counter(grids).items():
            segment_ms, key, num_patches = self._price(grid)
            cost_ms += count * segment_ms
            if key is None:
                held = False
            else:
                patches_by_key[key] += count * num_patches
        if not held:
            cost_ms += self._eager_base_ms
        key = patches_by_key.most_common(1)[0][0] if patches_by_key else None
        return Quote(cost_ms=cost_ms, key=key, held=held)

    def _price(self, grid: Grid) -> tuple[float, GraphKey | None, int]:
        shape = self._measure(grid)
        axis_keys, _ = self._table.home(grid)
        if axis_keys is None:
            return self.eager_ms_per_patch * shape.num_patches, None, shape.num_patches
        prices = [
            (view.cost_ms * share(shape, view.capacity), view.key)
            for view in self._table.ladders[axis_keys]
            if view.capacity.admits(shape)
        ]
        cost_ms, key = min(prices, key=lambda price: price[0])
        return cost_ms, key, shape.num_patches


def share(shape: SegmentShape, capacity: Capacity) -> float:
    """Part of a full replay that a segment takes up."""
    return max(
        shape.num_patches / capacity.patches,
        shape.num_tokens / capacity.tokens,
        1 / capacity.segments,
    )
