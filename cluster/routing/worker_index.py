"""`WorkerIndex`: the workers that may get leases, by the graphs they hold; groups of equals for each shape seen.

Groups change when a worker comes, goes or holds other graphs, not with every item. Sets of workers are whole numbers,
bit n for the worker in slot n, so that a change costs little among thousands of workers; what an item costs on those
that stay is remembered.
"""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from heapq import heappop, heappush
from typing import Any

import numpy as np

from cluster.routing.plans import Group, Plan, Seat
from cluster.routing.worker_view import WorkerView
from encoder.types import AxisKeys, Capacity, Grid, SegmentShape

ALIKE = 1.25  # costs within this factor make one group
SPEED_STEP = math.log(1.5)  # workers are grouped by speed in such steps before anything is priced
MAX_REMEMBERED_PLANS = 8192
MAX_REMEMBERED_SEATS = 2**20  # some 250 MB


class WorkerIndex:
    """The workers that may get leases, by the graphs they hold."""

    def __init__(
        self,
        *,
        axis_choices: Callable[[Grid], list[AxisKeys]],
        measure: Callable[[Grid], SegmentShape],
        rng: random.Random,
    ) -> None:
        self._axis_choices = axis_choices
        self._measure = measure
        self._rng = rng
        self._views: list[WorkerView] = []  # by slot; a free slot keeps its last one
        self._slots: dict[WorkerView, int] = {}
        self._free_slots: list[int] = []  # a heap
        self._all = 0
        self._holders: dict[AxisKeys, dict[tuple[Capacity, ...], int]] = defaultdict(dict)
        self._by_speed: dict[int, int] = {}
        self._splits: dict[Grid, list[int]] = {}
        self._plans: dict[tuple[Grid, ...], Plan] = {}
        self._seats: defaultdict[tuple[Grid, ...], dict[WorkerView, Seat]] = defaultdict(dict)  # priced so far
        self._num_priced = 0  # since it was empty
        self._counts = Counter[tuple[Grid, ...]]()  # leases of plans that are gone

    def __contains__(self, view: WorkerView) -> bool:
        return view in self._slots

    def __len__(self) -> int:
        return len(self._slots)

    def add(self, view: WorkerView) -> None:
        """Let it get leases. Its cost table must stay the same until it is removed."""
        if not self._free_slots:
            self._free_slots.append(len(self._views))
            self._views.append(view)
        slot = self._slots[view] = heappop(self._free_slots)
        self._views[slot] = view
        self._all |= 1 << slot
        for sets, name in self._sets_of(view):
            sets[name] = sets.get(name, 0) | 1 << slot
        self._forget()

    def remove(self, view: WorkerView) -> None:
        """No more leases for it."""
        slot = self._slots.pop(view)
        heappush(self._free_slots, slot)
        self._all &= ~(1 << slot)
        for sets, name in self._sets_of(view):
            sets[name] &= ~(1 << slot)
            if not sets[name]:
                del sets[name]
        for seats in self._seats.values():
            seats.pop(view, None)
        self._forget()

    def _sets_of(self, view: WorkerView) -> Iterator[tuple[dict[Any, int], Any]]:
        """The sets that it belongs to, and its name in each."""
        yield self._by_speed, round(math.log(max(view.costs.eager_ms_per_patch, 1e-9)) / SPEED_STEP)
        for axis_keys, ladder in view.costs.ladders.items():
            yield self._holders[axis_keys], tuple(graph.capacity for graph in ladder)

    def _forget(self) -> None:
        self._splits.clear()
        self._forget_plans()

    def _forget_plans(self) -> None:
        for grids, plan in self._plans.items():
            if plan.num_leased:
                self._counts[grids] += plan.num_leased
        self._plans.clear()

    def take_counts(self) -> Mapping[tuple[Grid, ...], int]:
        """Leases given since the last time, by shape."""
        counts, self._counts = self._counts, Counter()
        for grids, plan in self._plans.items():
            if plan.num_leased:
                counts[grids] += plan.num_leased
                plan.num_leased = 0
        return counts

    def _price(self, grids: tuple[Grid, ...], seats: dict[WorkerView, Seat], slot: int) -> Seat:
        """A seat on the worker in a slot, of those known if it is."""
        worker = self._views[slot]
        seat = seats.get(worker)
        if seat is None:
            seat = seats[worker] = Seat(worker, worker.costs.quote(grids))
            self._num_priced += 1
        return seat

    def plan(self, grids: tuple[Grid, ...]) -> Plan:
        """Where items of this shape may go, for one call. There must be workers."""
        plan = self._plans.get(grids)
        if plan is None:
            if len(self._seats) >= MAX_REMEMBERED_PLANS or self._num_priced >= MAX_REMEMBERED_SEATS:
                self._forget_plans()
                self._seats.clear()
                self._num_priced = 0
            plan = self._plans[grids] = self._plan(grids)
        plan.begin_call()
        return plan

    def _plan(self, grids: tuple[Grid, ...]) -> Plan:
        blocks = list(self._by_speed.values())
        for grid in dict.fromkeys(grids):
            blocks = [both for part in self._split(grid) for block in blocks if (both := block & part)]
        priced = sorted((self._cost_ms(block, grids), _lowest(block), block) for block in blocks)
        groups: list[Group] = []
        price = partial(self._price, grids, self._seats[grids])
        while priced:
            floor_ms, workers, num_alike = priced[0][0], 0, 0
            for cost_ms, _, block in priced:
                if cost_ms > ALIKE * floor_ms:
                    break
                workers |= block
                num_alike += 1
            groups.append(Group(partial(_slots, workers), price, floor_ms, self._rng))
            del priced[:num_alike]
        return Plan(grids, groups)

    def _cost_ms(self, workers: int, grids: tuple[Grid, ...]) -> float:
        """What one of them quotes; the others hold graphs of the same capacities and are about as fast."""
        return self._views[_lowest(workers)].costs.quote(grids).cost_ms

    def _split(self, grid: Grid) -> list[int]:
        """The workers by the graphs that a segment of this grid would go to; the last ones run it eagerly."""
        parts = self._splits.get(grid)
        if parts is None:
            parts, left, shape = [], self._all, self._measure(grid)
            for axis_keys in self._axis_choices(grid):
                for capacities, workers in self._holders.get(axis_keys, {}).items():
                    if any(capacity.admits(shape) for capacity in capacities):
                        parts.append(left & workers)
                        left &= ~workers
            self._splits[grid] = parts = [part for part in (*parts, left) if part]
        return parts


def _lowest(workers: int) -> int:
    """The first slot of a set that is not empty."""
    return (workers & -workers).bit_length() - 1


def _slots(workers: int) -> Sequence[int]:
    """Those of a set, in order: a seed tells all."""
    packed = np.frombuffer(workers.to_bytes(-(-workers.bit_length() // 8), "little"), np.uint8)
    slots: Sequence[int] = np.unpackbits(packed, bitorder="little").nonzero()[0]  # type: ignore[assignment]
    return slots
