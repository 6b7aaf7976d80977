"""What a trace says of each model: which kinds of items came, and what graphs and eager runs cost."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from cluster.planning.forecast import Candidate
from cluster.planning.histogram import Grids
from cluster.planning.traces import read_trace
from encoder.adapters.base import EncoderAdapter
from encoder.errors import ConfigError
from encoder.packing import EagerCost
from encoder.types import Capacity, GraphKey

GRAPH_BASE_MS, GRAPH_MS_PER_PATCH = 0.4, 0.0020
EAGER_BASE_MS, EAGER_MS_PER_PATCH = 5.0, 0.0021
"""Assumed where a trace has no times; about MiniCPM-V 2.6 on an H200 in bfloat16."""

GRAPH_BYTES = 8 << 20  # assumed for a recording itself
SCRATCH_BYTES_PER_PATCH = 32 << 10  # assumed of the pool that all graphs of a worker share


@dataclass(slots=True)
class Seen:
    """What a trace says of one model."""

    kinds: Counter[Grids] = field(default_factory=Counter)
    first_s: float = math.inf
    last_s: float = -math.inf
    graph_ms: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))  # by label
    eager: list[tuple[Grids, float]] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """How long the trace is; at least one."""
        return max(1.0, self.last_s - self.first_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What graphs and eager runs cost, and where that is known from."""

    by_label: Mapping[str, float]  # ms of a replay, of graphs that the trace has seen
    ms_per_patch: float  # of other graphs' capacity, beside GRAPH_BASE_MS
    eager: EagerCost
    source: str


def read_models(trace: Path) -> dict[str, Seen]:
    """What a trace says, by model. Raises ConfigError for no trace, or an empty one."""
    models: dict[str, Seen] = defaultdict(Seen)
    for record in read_trace(trace):
        seen = models[record.model]
        seen.kinds[record.grids] += 1
        seen.first_s, seen.last_s = min(seen.first_s, record.time_s), max(seen.last_s, record.time_s)
        if len(record.graphs) == 1 and not record.misses:
            seen.graph_ms[label_of(record.graphs[0])].append(record.ms)
        elif record.misses and not record.graphs:
            seen.eager.append((record.grids, record.ms))
    if not models:
        raise ConfigError(f"{trace} has no items yet; encode some with trace_file set")
    return dict(models)


def label_of(graph: str) -> str:
    """A graph key's text without its encoder, whose dtype a plan does not know."""
    return graph.partition("/")[2]


def costs_of(seen: Seen, adapter: EncoderAdapter) -> Costs:
    """Costs as the trace has them. Of each graph the lower quartile of its times: an item may also wait for the replay
    before its own."""
    by_label = {label: _lower_quartile(times) for label, times in seen.graph_ms.items()}
    rows = {label: _patches_of(label, adapter) for label in by_label}
    per_patch = [max(0.0, by_label[label] - GRAPH_BASE_MS) / patches for label, patches in rows.items() if patches]
    eager = [ms / sum(adapter.measure(grid).num_patches for grid in grids) for grids, ms in seen.eager if grids]
    ratio = EAGER_MS_PER_PATCH / GRAPH_MS_PER_PATCH
    base_ms = 0.0
    sources = []
    if per_patch:
        graph_ms = statistics.median(per_patch)
        number = len(per_patch)
        sources.append(f"{number} graph{'s' * (number != 1)} as in the trace, others {_us(graph_ms)} us a patch")
    else:
        graph_ms = _lower_quartile(eager) / ratio if eager else GRAPH_MS_PER_PATCH
        sources.append(f"graphs {_us(graph_ms)} us a patch (assumed)")
    if eager:
        eager_ms = _lower_quartile(eager)
        sources.append(f"eager {_us(eager_ms)} us a patch as in the trace")
    else:
        base_ms = EAGER_BASE_MS * graph_ms / GRAPH_MS_PER_PATCH
        eager_ms = graph_ms * ratio
        sources.append(f"eager {_us(eager_ms)} us a patch (assumed)")
    return Costs(
        by_label=by_label,
        ms_per_patch=graph_ms,
        eager=EagerCost(base_ms=base_ms, ms_per_patch=eager_ms),
        source="; ".join(sources),
    )


def _us(ms: float) -> str:
    """Microseconds to two figures, and never with an exponent where they are many."""
    us = ms * 1e3
    return f"{us:.2g}" if us < 99.5 else f"{us:.0f}"


def _lower_quartile(values: Sequence[float]) -> float:
    return float(np.quantile(values, 0.25))


def _patches_of(label: str, adapter: EncoderAdapter) -> int:
    """Rows of a graph named as `image[24x43]/512`; 0 for one that this adapter does not know."""
    keys, _, budget = label.partition("[")[2].rpartition("]/")
    axis_keys = tuple(keys.split(","))
    known = [set(axis.keys) for axis in adapter.axes]
    if len(axis_keys) != len(known) or any(key not in names for key, names in zip(axis_keys, known, strict=True)):
        return 0
    return adapter.capacity(axis_keys, int(budget)).patches


def candidate(key: GraphKey, adapter: EncoderAdapter, costs: Costs) -> Candidate:
    """A graph with its cost, and its memory as far as arithmetic knows it."""
    capacity = adapter.capacity(key.axis_keys, key.token_budget)
    cost_ms = costs.by_label.get(label_of(str(key)), GRAPH_BASE_MS + costs.ms_per_patch * capacity.patches)
    return Candidate(
        key=key,
        capacity=capacity,
        cost_ms=cost_ms,
        num_bytes=GRAPH_BYTES + _buffer_bytes(key, adapter, capacity),
        shared_bytes=SCRATCH_BYTES_PER_PATCH * capacity.patches,
    )


def _buffer_bytes(key: GraphKey, adapter: EncoderAdapter, capacity: Capacity) -> int:
    """Inputs, and outputs of two bytes a number."""
    specs = adapter.inputs(key.axis_keys, capacity).values()
    inputs = sum(math.prod(spec.shape) * np.dtype(spec.dtype).itemsize for spec in specs)
    return inputs + 2 * capacity.tokens * adapter.hidden_size
