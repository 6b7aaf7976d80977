"""Token budgets: which are captured for each combination of axis keys, and which suit a traffic. Pure functions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

from encoder.adapters.base import EncoderAdapter
from encoder.config import EncoderConfig
from encoder.errors import ConfigError
from encoder.types import AxisKeys, GraphKey

MAX_PATCHES = 2**31 - 1
"""Of one graph: offsets into its buffers are 32-bit numbers, in every backend."""

_Ladder = tuple[float, int, tuple[int, ...]]  # time, a size (bytes, or budgets), budgets


def token_budgets(adapter: EncoderAdapter, config: EncoderConfig, axis_keys: AxisKeys, device: str) -> tuple[int, ...]:
    """Budgets of these axis keys, ascending: the configured ones, or those that suit the configured traffic, or those
    that the adapter thinks worth it.

    Raises:
        ConfigError: an unknown layout in the map, no budget at all, a budget below 1, too small for a segment or too
            large for a graph, `max_segments_per_graph` above the smallest budget (a segment gives at least one token),
            or traffic where there are several combinations of axis keys.
    """
    configured = config.token_budgets
    if isinstance(configured, dict):
        known = {str(key) for axis in adapter.axes for key in axis.keys}
        unknown = configured.keys() - known
        if unknown:
            raise ConfigError(
                f"token_budgets names {sorted(unknown)}, which no capture axis has; keys are {sorted(known)}"
            )
        given: Sequence[int] | None = next((configured[str(key)] for key in axis_keys if str(key) in configured), None)
    else:
        given = configured
    if given is None:
        given = adapter.default_budgets(axis_keys, device)
        if config.traffic:
            given = _budgets_for_traffic(config.traffic, given, adapter)
    budgets = tuple(sorted(set(given)))
    if not budgets:
        raise ConfigError(f"no token budgets for {axis_keys}; name at least one, or set graphs: false")
    if budgets[0] < 1:
        raise ConfigError(f"token budget {budgets[0]} for {axis_keys}: budgets are positive")
    most = config.max_segments_per_graph
    if most is not None and most > budgets[0]:
        raise ConfigError(
            f"max_segments_per_graph is {most}, but the smallest token budget is {budgets[0]} and a segment gives at "
            f"least one token; raise the budget or lower the segments"
        )
    for budget in budgets:
        capacity = adapter.capacity(axis_keys, budget)  # raises for a budget that holds no segment
        if capacity.patches > MAX_PATCHES:
            raise ConfigError(
                f"token budget {budget} for {axis_keys} is a graph of {capacity.patches} patches, which are numbered "
                f"by 32 bits; name a smaller budget or layout"
            )
    return budgets


def graph_keys(adapter: EncoderAdapter, config: EncoderConfig, encoder_id: str, device: str) -> list[GraphKey]:
    """Every combination of axis keys and token budget that the configuration asks for, largest budget first.

    Raises:
        ConfigError: an axis without keys, no budget, a budget that holds no segment, or more segments a graph than
            the smallest budget has tokens.
    """
    for axis in adapter.axes:
        if not axis.keys:
            raise ConfigError(f"capture axis {axis.name!r} has no keys; name at least one, or set graphs: false")
    keys: list[GraphKey] = []
    for axis_keys in itertools.product(*(axis.keys for axis in adapter.axes)):
        keys += [
            GraphKey(encoder=encoder_id, path=adapter.path, axis_keys=axis_keys, token_budget=budget)
            for budget in token_budgets(adapter, config, axis_keys, device)
        ]
    return sorted(keys, key=lambda key: key.token_budget, reverse=True)


def _budgets_for_traffic(traffic: Mapping[int, float], ladder: Sequence[int], adapter: EncoderAdapter) -> Sequence[int]:
    """As many budgets as the ladder has up to the largest item, for items that come alone; the ladder's above it stay,
    for items that ride together."""
    if math.prod(len(axis.keys) for axis in adapter.axes) != 1:
        raise ConfigError(
            "traffic says what items ask of one graph ladder, but there are several combinations of axis keys; "
            "name token_budgets for each layout instead"
        )
    largest = max(traffic)
    above = [budget for budget in ladder if budget > largest]
    return [*choose_budgets(traffic, max_graphs=max(1, len(ladder) - len(above))), *above]


LAUNCH_TOKENS = 16.0
"""What the launches of a replay cost, in tokens of work."""


def affine_ms(budget: int) -> float:
    """Cost of a replay up to a factor: proportional to its rows, but for its launches."""
    return LAUNCH_TOKENS + budget


def choose_budgets(
    counts: Mapping[int, float],
    *,
    cost_ms: Callable[[int], float] | Mapping[int, float] = affine_ms,
    max_graphs: int,
    max_bytes: int | None = None,
    bytes_of: Callable[[int], int] = lambda budget: 0,
) -> tuple[int, ...]:
    """Budgets, ascending, for which work of the given sizes takes least time in expectation.

    Work runs in the smallest budget that holds it; what exceeds the largest runs in whole replays of the largest and
    one for the rest. Exact: with the largest budget given this is optimal bucketing, a shortest path over the sorted
    candidates (the dynamic program of 1-D k-medians, Bellman 1973; Wang and Song 2011), solved for each largest one:
    O(n**2 k) a largest, O(n**3 k) in all, times the number of undominated (cost, bytes) pairs where bytes are bounded.

    Args:
        counts: how often work of each size comes, in any unit; sizes as budgets count, such as tokens of an item.
        cost_ms: time of a replay of each budget: a function, for budgets at the sizes themselves, or a table, whose
            budgets are the candidates.
        max_graphs: most budgets, at least 1.
        max_bytes: most bytes of all budgets together; None: unbounded.
        bytes_of: bytes of a budget.

    Raises:
        ConfigError: no size, a size below 1, a weight that is negative or no number, a bound below 1, or bytes that
            hold no budget at all.
    """
    sizes = sorted(size for size, weight in counts.items() if weight)
    bad = [(size, weight) for size, weight in counts.items() if size < 1 or not 0 <= weight < math.inf]
    if bad or not sizes:
        raise ConfigError(f"sizes are positive and have positive weights, got {bad[:3] or dict(counts)}")
    if max_graphs < 1:
        raise ConfigError(f"max_graphs is {max_graphs}; at least one graph is needed to choose budgets")
    table = cost_ms if isinstance(cost_ms, Mapping) else {size: cost_ms(size) for size in sizes}
    room = math.inf if max_bytes is None else max_bytes
    candidates = sorted(budget for budget in table if bytes_of(budget) <= room)
    if not candidates:
        raise ConfigError(f"no budget among {sorted(table)[:8]} fits into {max_bytes} bytes; allow more")
    best: _Ladder = (math.inf, 0, ())
    for number, largest in enumerate(candidates):
        whole_ms, rest = _cut(counts, largest, table[largest])
        below = candidates[:number]
        found = _cheapest_ladder(rest, below, largest, table, max_graphs, room, bytes_of)
        best = min(best, (whole_ms + found[0], len(found[1]), found[1]))  # fewer graphs among equals
    return best[2]


def _cut(counts: Mapping[int, float], largest: int, largest_ms: float) -> tuple[float, dict[int, float]]:
    """Time of the whole replays of the largest budget, and how often rests of each size are left."""
    whole_ms, rest = 0.0, dict[int, float]()
    for size, weight in counts.items():
        replays = (size - 1) // largest
        whole_ms += weight * replays * largest_ms
        rest[size - replays * largest] = rest.get(size - replays * largest, 0.0) + weight
    return whole_ms, rest


def _cheapest_ladder(
    rest: Mapping[int, float],
    below: Sequence[int],
    largest: int,
    table: Mapping[int, float],
    max_graphs: int,
    room: float,
    bytes_of: Callable[[int], int],
) -> tuple[float, tuple[int, ...]]:
    """Least time of work of sizes up to `largest`, and the budgets, `largest` among them."""
    steps = [*below, largest]
    upto = [sum(weight for size, weight in rest.items() if size <= budget) for budget in steps]
    # Of ladders that end at a step: (time, bytes, budgets), none of them worse in both than another of its length.
    ladders: list[list[list[_Ladder]]] = []
    for step, budget in enumerate(steps):
        own = bytes_of(budget)
        by_length: list[list[_Ladder]] = [[(upto[step] * table[budget], own, (budget,))]]
        for length in range(1, max_graphs):
            longer = [
                (time + (upto[step] - upto[before]) * table[budget], used + own, (*budgets, budget))
                for before in range(step)
                if length <= len(ladders[before])
                for time, used, budgets in ladders[before][length - 1]
                if used + own <= room
            ]
            if not longer:
                break
            by_length.append(_undominated(longer))
        ladders.append(by_length)
    return min((ladder[0], ladder[2]) for same_length in ladders[-1] for ladder in same_length)


def _undominated(ladders: list[_Ladder]) -> list[_Ladder]:
    """Those that no other beats in both time and bytes."""
    kept: list[_Ladder] = []
    for ladder in sorted(ladders):
        if not kept or ladder[1] < kept[-1][1]:
            kept.append(ladder)
    return kept
