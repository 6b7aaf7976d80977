"""Token budgets: which are captured for each combination of axis keys. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

from encoder.adapters.base import EncoderAdapter
from encoder.config import EncoderConfig
from encoder.errors import ConfigError
from encoder.types import AxisKeys


def token_budgets(adapter: EncoderAdapter, config: EncoderConfig, axis_keys: AxisKeys, device: str) -> tuple[int, ...]:
    """Budgets of these axis keys, ascending: the configured ones, or those the adapter thinks worth it.

    Raises:
        ConfigError: an unknown layout in the map, no budget at all, a budget below 1 or too small for a segment, or
            `max_segments_per_graph` above the smallest budget (a segment gives at least one token).
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
    budgets = tuple(sorted(set(adapter.default_budgets(axis_keys, device) if given is None else given)))
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
        adapter.capacity(axis_keys, budget)  # raises for a budget that holds no segment
    return budgets
