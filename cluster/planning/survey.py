"""`survey`: from what workers report and the router has seen to what `plan` wants to know. Pure; no Ray, no torch.

Workers of a pool may compute in different numbers, at different speeds. A plan is made in the times of the first one,
for graph keys that name no dtype; `Survey.keys_of` gives them back their names.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from cluster.planning.forecast import Candidate, WorkerRoom
from cluster.planning.histogram import Grids
from cluster.planning.plan import Plan, plan
from encoder.adapters.base import EncoderAdapter
from encoder.budgets import choose_budgets, graph_keys
from encoder.config import EncoderConfig
from encoder.errors import ConfigError
from encoder.packing import EagerCost, GraphView
from encoder.types import GraphKey
from workers.messages import WorkerReport

MAX_SIZES = 32  # of items, that budgets are chosen for
NO_SHARES: Mapping[str, float] = {}
NUM_OWN_BUDGETS = 6  # offered for the items of the traffic, on top of those that the configuration asks for


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """A planning problem."""

    adapter: EncoderAdapter
    rates: Mapping[Grids, float]  # items per second
    candidates: tuple[Candidate, ...]
    rooms: tuple[WorkerRoom, ...]
    current: Mapping[str, tuple[GraphKey, ...]]  # what each worker holds
    eager: EagerCost
    encoders: Mapping[str, str]  # by worker: what its graph keys call the encoder
    capture_ms: float  # of one graph

    def plan(self) -> Plan:
        """The best graph sets. Takes up to seconds."""
        return plan(
            self.rates, self.candidates, self.rooms,
            axis_choices=self.adapter.axis_choices, measure=self.adapter.measure, eager=self.eager,
            current=self.current,
        )  # fmt: skip

    def wanted(self, proposed: Plan) -> dict[str, tuple[GraphKey, ...]]:
        """The planned set of each worker, largest first, and what it holds besides and has the memory to keep."""
        by_key = {candidate.key: candidate for candidate in self.candidates}
        sets = {}
        for room in self.rooms:
            kept = [by_key[key] for key in proposed.sets()[room.worker_id]]
            held = [by_key[key] for key in self.current[room.worker_id] if key in by_key]
            for one in sorted(held, key=lambda one: one.capacity.patches):
                more = [*kept, one]
                if one not in kept and _num_bytes(more) <= room.memory_bytes:
                    kept = more
            ordered = sorted(kept, key=lambda one: (-one.capacity.patches, str(one.key)))
            foreign = [key for key in self.current[room.worker_id] if key not in by_key]
            sets[room.worker_id] = (*(one.key for one in ordered), *foreign)
        return sets

    def keys_of(self, worker_id: str, keys: Collection[GraphKey]) -> tuple[GraphKey, ...]:
        """Keys as this worker names them."""
        return tuple(replace(key, encoder=self.encoders[worker_id]) for key in keys)


def survey(
    reports: Sequence[WorkerReport],
    rates: Mapping[Grids, float],
    adapter: EncoderAdapter,
    config: EncoderConfig,
    *,
    memory_bytes: int | None = None,
    memory_shares: Mapping[str, float] = NO_SHARES,
    banned: Collection[GraphKey] = (),
) -> Survey:
    """What there is to plan with.

    Args:
        reports: of the workers to plan for, at least one.
        rates: items per second of each kind.
        memory_bytes: most that graphs may take on a worker, where its own limit is not lower.
        memory_shares: parts of their own limits that workers may use, by group, where several share a device.
        banned: keys, as `Survey` names them, that are not to be captured.
    """
    reference = reports[0]
    speeds = {report.worker_id: _speed(report, reference) for report in reports}
    known = _known(reports, speeds, adapter.encoder)
    current = {
        report.worker_id: tuple(replace(view.key, encoder=adapter.encoder) for view in report.graphs)
        for report in reports
    }
    held = {key for keys in current.values() for key in keys}
    wanted = {*held, *known, *_offers(adapter, config, rates, reference.device)} - (set(banned) - held)
    return Survey(
        adapter=adapter,
        rates=rates,
        candidates=tuple(_candidate(key, adapter, known) for key in sorted(wanted, key=str) if _can_be(key, adapter)),
        rooms=tuple(
            WorkerRoom(
                worker_id=report.worker_id,
                memory_bytes=min(
                    memory_bytes or report.graph_limit_bytes,
                    int(report.graph_limit_bytes * memory_shares.get(report.worker_id.rpartition("-")[0], 1.0)),
                ),
                speed=speeds[report.worker_id],
            )
            for report in reports
        ),
        current=current,
        eager=EagerCost(
            base_ms=reference.eager_base_ms,
            ms_per_patch=reference.eager_ms_per_patch,
            measured=reference.eager_measured,
        ),
        encoders={report.worker_id: report.encoder for report in reports},
        capture_ms=max((report.capture_ms for report in reports), default=0.0)
        or 8 * statistics.fmean([view.cost_ms for view in known.values()] or [0.0]),  # it runs a graph about so often
    )


def item_sizes(kinds: Mapping[Grids, float], adapter: EncoderAdapter) -> dict[int, float]:
    """How often items of so many tokens come; rare sizes are rounded up to a more frequent one."""
    sizes = Counter[int]()
    for grids, count in kinds.items():
        sizes[sum(adapter.measure(grid).num_tokens for grid in grids)] += count  # type: ignore[assignment]
    kept = sorted({max(sizes), *(size for size, _ in sizes.most_common(MAX_SIZES - 1))})
    rounded: dict[int, float] = {}
    for size, count in sizes.items():
        budget = next(budget for budget in kept if budget >= size)
        rounded[budget] = rounded.get(budget, 0.0) + count
    return rounded


def _offers(
    adapter: EncoderAdapter, config: EncoderConfig, rates: Mapping[Grids, float], device: str
) -> list[GraphKey]:
    """What the configuration asks for, and budgets for the items of the traffic where it leaves them to us."""
    if not config.graphs:
        return []
    keys = graph_keys(adapter, config, adapter.encoder, device.partition(":")[0])
    axis_keys = {key.axis_keys for key in keys}
    if config.token_budgets is not None or len(axis_keys) != 1 or not rates:
        return keys
    largest = keys[0]
    for budget in choose_budgets(item_sizes(rates, adapter), max_graphs=NUM_OWN_BUDGETS):
        key = replace(largest, token_budget=budget)
        if budget < largest.token_budget and key not in keys:
            keys.append(key)
    return keys


def _can_be(key: GraphKey, adapter: EncoderAdapter) -> bool:
    """Whether this adapter knows such a graph: a worker of another group may hold one along other axes."""
    try:
        adapter.capacity(key.axis_keys, key.token_budget)
    except (ConfigError, LookupError):
        return False
    return True


def _speed(report: WorkerReport, reference: WorkerReport) -> float:
    """How fast a worker replays, the reference being 1."""
    theirs = {replace(view.key, encoder=""): view.cost_ms for view in reference.known_graphs}
    ours = {replace(view.key, encoder=""): view.cost_ms for view in report.known_graphs}
    ratios = [theirs[key] / ours[key] for key in theirs.keys() & ours.keys() if ours[key] > 0 and theirs[key] > 0]
    if ratios:
        return statistics.median(ratios)
    if reference.eager_ms_per_patch > 0 and report.eager_ms_per_patch > 0:
        return reference.eager_ms_per_patch / report.eager_ms_per_patch
    return 1.0


def _known(reports: Sequence[WorkerReport], speeds: Mapping[str, float], encoder: str) -> dict[GraphKey, GraphView]:
    """Every graph that some worker has captured: its mean cost in reference time, and its largest size."""
    views: dict[GraphKey, list[GraphView]] = {}
    for report in reports:
        for view in report.known_graphs:
            timed = replace(view, cost_ms=view.cost_ms * speeds[report.worker_id])
            views.setdefault(replace(view.key, encoder=encoder), []).append(timed)
    return {
        key: replace(
            each[0],
            key=key,
            cost_ms=statistics.fmean(view.cost_ms for view in each),
            num_bytes=max(view.num_bytes for view in each),
            shared_bytes=max(view.shared_bytes for view in each),
        )
        for key, each in views.items()
    }


def _candidate(key: GraphKey, adapter: EncoderAdapter, known: Mapping[GraphKey, GraphView]) -> Candidate:
    """A graph as it was captured, or as those that were let expect."""
    capacity = adapter.capacity(key.axis_keys, key.token_budget)
    view = known.get(key)
    if view is not None:
        cost_ms, own, shared = view.cost_ms, view.num_bytes, view.shared_bytes
    else:
        like = [one for one in known.values() if one.key.axis_keys == key.axis_keys] or list(known.values())
        cost_ms = _line([(one.capacity.patches, one.cost_ms) for one in like], capacity.patches)
        own = int(_line([(one.capacity.patches, one.num_bytes) for one in like], capacity.patches))
        shared = int(_line([(one.capacity.patches, one.shared_bytes) for one in like], capacity.patches))
    return Candidate(key=key, capacity=capacity, cost_ms=cost_ms, num_bytes=own, shared_bytes=shared)


def _line(points: Sequence[tuple[float, float]], x: float) -> float:
    """On the line through the two neighbours of x, or the two nearest to it; through the origin if there is but one."""
    ordered = sorted(dict(points).items())
    if not ordered:
        return 0.0
    if len(ordered) == 1:
        return ordered[0][1] * x / ordered[0][0]
    above = next((number for number, (place, _) in enumerate(ordered) if place > x), len(ordered))
    (x0, y0), (x1, y1) = ordered[min(max(above - 1, 0), len(ordered) - 2) :][:2]
    found = y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    low, high = sorted((y0 * x / x0, y1 * x / x1))
    return found if x0 <= x <= x1 else min(max(found, low / 2), 2 * high)  # measured: a slope may be noise


def _num_bytes(graphs: Sequence[Candidate]) -> int:
    return sum(one.num_bytes for one in graphs) + max((one.shared_bytes for one in graphs), default=0)
