"""`encpool plan`: from a trace, a number of workers and their memory to graph sets, as a table."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from cluster.groups import MAX_WORKERS
from cluster.planning.forecast import Candidate, Forecast, WorkerRoom
from cluster.planning.histogram import Grids
from cluster.planning.plan import Plan, plan
from cluster.planning.survey import item_sizes
from cluster.planning.traces import read_trace
from cluster.tables import aligned
from encoder.adapters.base import EncoderAdapter
from encoder.adapters.registry import load_adapter
from encoder.budgets import choose_budgets, graph_keys
from encoder.config import EncoderConfig
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


def plan_trace(
    trace: Path, encoders: Sequence[EncoderConfig], *, num_workers: int, memory_gib: float, device: str
) -> str:
    """Plan for what a trace has seen; the answer as text.

    Args:
        encoders: models, each with the layouts and budgets to choose from, of which the one in the trace is planned
            for; none: the trace's own model with the default.
        device: whose default budgets are offered: "cuda" or "cpu".

    Raises:
        ConfigError: no trace, none of this model in it, several models and none named, more workers than a pool may
            have, or settings that cannot work.
    """
    if num_workers > MAX_WORKERS:
        raise ConfigError(f"{num_workers} workers are more than the {MAX_WORKERS} that a pool may have")
    models = read_models(trace)
    if not encoders and len(models) > 1:
        raise ConfigError(f"{trace} has items of {', '.join(sorted(models))}; choose one with --model")
    offered = [(one, load_adapter(one)) for one in encoders or [EncoderConfig(model=next(iter(models)))]]
    found = [(one, adapter) for one, adapter in offered if adapter.encoder in models]
    if not found:
        names = " or ".join(adapter.encoder for _, adapter in offered)
        raise ConfigError(f"{trace} has no items of {names}, only of {', '.join(sorted(models))}")
    if len(found) > 1:
        names = ", ".join(one.model for one, _ in found)
        raise ConfigError(f"{trace} has items of several models of the configuration; choose one with --model: {names}")
    ((encoder, adapter),) = found
    seen = models[adapter.encoder]
    costs = costs_of(seen, adapter)
    keys = graph_keys(adapter, encoder, adapter.encoder, device)
    candidates = [candidate(key, adapter, costs) for key in keys]
    rooms = [
        WorkerRoom(worker_id=f"worker {number}", memory_bytes=int(memory_gib * 2**30)) for number in range(num_workers)
    ]
    everything = configured_set(candidates, rooms[0].memory_bytes)
    proposed = plan(
        {grids: count / seen.seconds for grids, count in seen.kinds.items()}, candidates, rooms,
        axis_choices=adapter.axis_choices, measure=adapter.measure, eager=costs.eager,
        current={room.worker_id: everything for room in rooms},
    )  # fmt: skip
    num_items = seen.kinds.total()
    lines = [
        f"{adapter.encoder}: {num_items} items of {len(seen.kinds)} kinds in {seen.seconds:.0f} s",
        f"costs: {costs.source}",
        "",
        _sets_table(proposed),
        "",
        _forecast_table(proposed, num_workers),
    ]
    if len({key.axis_keys for key in keys}) == 1:
        lines += ["", _budgets(seen, adapter, len(keys))]
    return "\n".join(lines)


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


def configured_set(candidates: Sequence[Candidate], memory_bytes: int) -> tuple[GraphKey, ...]:
    """What a worker captures without a plan: everything, largest first, while memory lasts."""
    taken: list[Candidate] = []
    for one in sorted(candidates, key=lambda one: -one.key.token_budget):
        more = [*taken, one]
        if sum(each.num_bytes for each in more) + max(each.shared_bytes for each in more) <= memory_bytes:
            taken = more
    return tuple(one.key for one in taken)


def _sets_table(proposed: Plan) -> str:
    """Workers with the same set in one line."""
    same: dict[tuple[tuple[GraphKey, ...], int], list[int]] = defaultdict(list)
    for number, placement in enumerate(proposed.placements):
        same[placement.keys, placement.num_bytes].append(number)
    rows = [
        (_ranges(numbers), f"{num_bytes / 2**30:.2f}", _keys(keys) or "none: everything runs eagerly")
        for (keys, num_bytes), numbers in same.items()
    ]
    return aligned(("workers", "GiB", "graphs"), rows, right=("GiB",))


def _keys(keys: Sequence[GraphKey]) -> str:
    """Budgets by axis keys: `image[packed]/64,512`."""
    budgets: dict[str, list[str]] = defaultdict(list)
    for key in keys:
        name, _, budget = label_of(str(key)).rpartition("/")
        budgets[name].append(budget)
    return "  ".join(f"{name}/{','.join(each)}" for name, each in budgets.items())


def _ranges(numbers: Sequence[int]) -> str:
    """`0-3, 6` of ascending numbers."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)


def _forecast_table(proposed: Plan, num_workers: int) -> str:
    found, now = proposed.forecast, proposed.current
    assert now is not None
    eager = Forecast(
        ms_per_s=found.eager_ms_per_s,
        busiest_ms_per_s=found.eager_ms_per_s / num_workers,
        eager_ms_per_s=found.eager_ms_per_s,
        hit_rate=0.0,
        fill=0.0,
    )
    rows = [
        (
            name,
            f"{one.hit_rate:.0%}",
            f"{one.fill:.0%}" if one.fill else "-",
            f"{one.ms_per_s:.0f}",
            f"{one.busiest_ms_per_s:.0f}",
            f"{one.saved:.0%}",
        )
        for name, one in (("this plan", found), ("the same on each, largest first", now), ("no graphs", eager))
    ]
    header = ("predicted", "hit rate", "fill", "ms/s of all", "ms/s of the busiest", "time saved")
    note = f"ms/s: GPU milliseconds for each second of such traffic; workers were taken to be busy {proposed.busy:.0%}"
    return f"{aligned(header, rows, right=header[1:])}\n{note}"


def _budgets(seen: Seen, adapter: EncoderAdapter, num_graphs: int) -> str:
    """Budgets that suit items that come alone, and the setting that asks for them."""
    rounded = item_sizes(seen.kinds, adapter)
    budgets = choose_budgets(rounded, max_graphs=num_graphs)
    traffic = ", ".join(f"{size}: {count:g}" for size, count in sorted(rounded.items()))
    return (
        f"token budgets for such items alone: {', '.join(map(str, budgets))}\n"
        f"in a configuration:\nworker: {{ encoder: {{ traffic: {{ {traffic} }} }} }}"
    )
