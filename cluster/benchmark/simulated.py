"""Simulated workers: 64 shapes, each with an axis key of its own; hot keys on many workers, cold keys on few.

A miss costs eight times a hit, and workers differ a little in speed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import cast

from cluster.routing.leases import Ask, LeaseRequest, pack
from cluster.routing.router import Router
from encoder.adapters.base import EncoderAdapter
from encoder.packing import GraphView
from encoder.types import AxisKeys, Capacity, GraphKey, Grid, ItemShape, SegmentShape
from workers.messages import WorkerReport, WorkerState, WorkerStats

NUM_KEYS = 64
GRAPHS_EACH = 8
BATCH = 256  # items a call
MISS_FACTOR = 8.0
GRIDS: list[Grid] = [(1, 8 + number, 16) for number in range(NUM_KEYS)]
ENCODED_BYTES = (20_000, 400_000)  # an item's
WEIGHTS = [1 / (rank + 1) for rank in range(NUM_KEYS)]  # zipf


class _Shapes:
    """An adapter of nothing but shapes: one axis key a grid."""

    def axis_choices(self, grid: Grid) -> list[AxisKeys]:
        return [(f"{grid[1]}x{grid[2]}",)]

    def measure(self, grid: Grid) -> SegmentShape:
        return SegmentShape(grid=grid, num_patches=math.prod(grid), num_tokens=16)


def simulated_router(num_workers: int, rng: random.Random) -> Router:
    """A router over simulated workers."""
    router = Router(cast(EncoderAdapter, _Shapes()), lease_timeout_s=1e9, silent_timeout_s=1e9, rng=rng)
    for report in simulated_workers(num_workers, rng):
        router.register(report)
    return router


def simulated_workers(num_workers: int, rng: random.Random) -> Iterator[WorkerReport]:
    """Workers with graph sets of `GRAPHS_EACH` keys (more when the workers are few)."""
    adapter = _Shapes()
    for number, keys in enumerate(_graph_sets(num_workers, rng)):
        speed = rng.uniform(0.95, 1.05)
        graphs = []
        for key in sorted(keys):
            shape = adapter.measure(GRIDS[key])
            room = Capacity(patches=16 * shape.num_patches, segments=16, tokens=256, longest=shape.num_patches)
            (axis_keys,) = adapter.axis_choices(GRIDS[key])
            name = GraphKey(encoder="simulated", path="image", axis_keys=axis_keys, token_budget=256)
            graphs.append(GraphView(key=name, capacity=room, cost_ms=0.05 * speed * room.patches))
        yield WorkerReport(
            worker_id=f"worker-{number}",
            incarnation=f"worker-{number}/0",
            state=WorkerState.READY,
            error=None,
            device="simulated",
            gpu_uuid=None,
            host="",
            pid=0,
            encoder="simulated",
            model="simulated",
            graphs=tuple(graphs),
            eager_ms_per_patch=0.05 * MISS_FACTOR * speed,
            max_queue_ms=1e12,
            max_queue_bytes=2**60,
            backlog_ms=0.0,
            backlog_bytes=0,
            num_waiting=0,
            stats=WorkerStats(),
        )


def _graph_sets(num_workers: int, rng: random.Random) -> list[set[int]]:
    """Every key on at least one worker, the rest of the room by how often a key is asked for."""
    sets: list[set[int]] = [set() for _ in range(num_workers)]
    room = max(GRAPHS_EACH, 2 * NUM_KEYS // num_workers)
    for key in range(NUM_KEYS):
        min(sets, key=len).add(key)
    for held in sets:
        while len(held) < room:
            held.update(rng.choices(range(NUM_KEYS), WEIGHTS))
    return sets


def asks(number: int, rng: random.Random) -> list[Ask]:
    """Calls of `BATCH` items each, as they travel: what a client sends of a pool whose workers have no cache."""
    shapes = [ItemShape(grids=(grid,), num_patches=math.prod(grid), num_tokens=16) for grid in GRIDS]
    return [
        pack(
            [
                LeaseRequest(shape=shape, num_bytes=rng.randrange(*ENCODED_BYTES))
                for shape in rng.choices(shapes, WEIGHTS, k=BATCH)
            ],
            client="bench",
        )
        for _ in range(number)
    ]
