"""`encpool plan`: from a trace, a number of workers and their memory to graph sets, as a table."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from cluster.groups import MAX_WORKERS
from cluster.planning.forecast import Candidate, Forecast, WorkerRoom
from cluster.planning.plan import Plan, plan
from cluster.planning.survey import item_sizes
from cluster.planning.trace_costs import Seen, candidate, costs_of, label_of, read_models
from cluster.tables import aligned
from encoder.adapters.base import EncoderAdapter
from encoder.adapters.registry import load_adapter
from encoder.budgets import choose_budgets, graph_keys
from encoder.config import EncoderConfig
from encoder.errors import ConfigError
from encoder.types import GraphKey


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
