"""Captured graphs: static inputs, one recorded forward, static outputs; and the set of them that a worker holds.

Two backends behave alike. `cuda` records a torch.cuda.CUDAGraph and replays it. `static` (CPU) keeps the same buffers,
the same padding and the same output, and runs the forward at each replay, so that all but the recording is exercised
without a GPU.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from encoder.adapters.base import EncoderAdapter, EncoderModel, Segment
from encoder.arena import ArenaLayout
from encoder.cost_book import CostBook
from encoder.errors import EncoderPoolError
from encoder.measuring import bytes_outside_torch, free_bytes, run_ms, scratch_bytes
from encoder.packing import GraphView, take
from encoder.types import AxisKeys, Capacity, GraphKey

logger = logging.getLogger(__name__)

MANY_GRAPHS = 64
MAX_KNOWN = 256  # graphs whose size is remembered


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureReport:
    """What capturing a graph set took."""

    num_graphs: int
    seconds: float
    num_bytes: int  # device memory that the graphs, their inputs and outputs hold
    failed: dict[GraphKey, str] = field(default_factory=dict)


class Graph:
    """One captured graph. The owner of the GPU writes its inputs, replays it, and copies its output out."""

    def __init__(
        self,
        key: GraphKey,
        capacity: Capacity,
        adapter: EncoderAdapter,
        model: EncoderModel,
        device: torch.device,
        pool: Any,
    ) -> None:
        """Allocate the inputs and, on CUDA, warm up and record. Device errors are the caller's to handle."""
        self.key, self.capacity, self.pool = key, capacity, pool
        self.layout = ArenaLayout.of(adapter.inputs(key.axis_keys, capacity))
        self._model = model
        # Zeros are valid everywhere: no rows, position 0. Never-written pad rows must not hold NaN.
        self.block = torch.zeros(self.layout.num_bytes, dtype=torch.uint8, device=device)
        self._inputs = self.layout.views(self.block)
        self._cuda_graph: torch.cuda.CUDAGraph | None = None
        model.reserve(capacity.longest)
        self.shared_bytes = self.grown_bytes = recording_bytes = 0
        if device.type == "cuda":
            self._forward()  # libraries choose algorithms and allocate workspaces on first use
            torch.cuda.synchronize(device)
            self.shared_bytes = scratch_bytes(self._forward, device)
            torch.cuda.synchronize(device)
            self._cuda_graph = torch.cuda.CUDAGraph()
            outside = bytes_outside_torch(device)
            # "thread_local": what other threads do while a worker in traffic captures is no business of the capture.
            graph = torch.cuda.graph(self._cuda_graph, pool=pool, capture_error_mode="thread_local")
            # The outer one restores the stream, which a capture that fails would leave at its own.
            with torch.cuda.stream(torch.cuda.current_stream(device)), graph:
                reserved = torch.cuda.memory_reserved(device)  # only now: a capture begins by emptying torch's cache
                self.output_TE = self._forward()
                self.grown_bytes = max(0, torch.cuda.memory_reserved(device) - reserved - self.output_TE.nbytes)
            recording_bytes = max(0, bytes_outside_torch(device) - outside)
        else:
            self.output_TE = self._forward()
        self.num_bytes = self.block.nbytes + self.output_TE.nbytes + recording_bytes

    def _forward(self) -> torch.Tensor:
        return self._model.forward(self._inputs, self.key.axis_keys, self.capacity)

    def replay(self) -> None:
        """Run on the current stream over what the inputs hold; `output_TE` is valid until the next replay."""
        if self._cuda_graph is not None:
            self._cuda_graph.replay()
        else:
            self.output_TE = self._forward()

    def load(self, segments: Sequence[Segment], adapter: EncoderAdapter) -> None:
        """Write segments into the inputs and wait until they are there: for measuring, not for traffic."""
        host = torch.zeros_like(self.block, device="cpu")
        adapter.fill(self.layout.arrays(host), segments, self.key.axis_keys, self.capacity)
        self.block.copy_(host)

    def view(self, cost_ms: float) -> GraphView:
        """What others need to know of it."""
        return GraphView(
            key=self.key,
            capacity=self.capacity,
            cost_ms=cost_ms,
            num_bytes=self.num_bytes,
            shared_bytes=self.shared_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphMemory:
    """Device memory of a graph set. On a CPU it is the host's, and nobody counts what is free."""

    used_bytes: int  # own memory of all graphs, and the pools of scratch that they share
    scratch_bytes: int  # of that: the pool that the next capture would share
    free_bytes: int | None  # of the device


class GraphSet:
    """The graphs that one worker holds."""

    def __init__(self, adapter: EncoderAdapter, model: EncoderModel, device: torch.device, book: CostBook) -> None:
        self._adapter, self._model, self._device, self._book = adapter, model, device, book
        self.graphs: dict[GraphKey, Graph] = {}
        self.failed: dict[GraphKey, str] = {}
        self.known: dict[GraphKey, GraphView] = {}  # every graph that was ever captured, as it was then
        self._pool: Any = None  # memory that all its CUDA graphs share
        self._scratch: dict[Any, int] = {}  # bytes of each such pool that a graph is in, as the device counts them
        self._spread = 1.0  # of a pool's bytes over those that the forward it was made for has in use at once: gaps

    def capture(self, keys: Iterable[GraphKey]) -> CaptureReport:
        """Capture the keys in the order given, largest first; one that fails is left out and the rest go on."""
        wanted = list(keys)
        if len(wanted) > MANY_GRAPHS:
            logger.warning("capturing %d graphs; each holds memory of its own, consider fewer keys", len(wanted))
        self._clear_cache()  # what others have freed must not count as ours
        started_s, free_before = time.monotonic(), free_bytes(self._device)
        for number, key in enumerate(wanted):
            # Largest first: later captures reuse the pool that the first one sized.
            if self.add(key) and number == 0 and len(wanted) > MANY_GRAPHS:
                held = free_before - free_bytes(self._device)
                logger.warning("the first of %d graphs took %.2f GiB", len(wanted), held / 2**30)
        self._clear_cache()
        report = CaptureReport(
            num_graphs=len(self.graphs),
            seconds=time.monotonic() - started_s,
            num_bytes=max(0, free_before - free_bytes(self._device)),
            failed=dict(self.failed),
        )
        logger.info(
            "captured %d graphs in %.1f s, %.2f GiB, %.2f GiB left",
            report.num_graphs, report.seconds, report.num_bytes / 2**30, free_bytes(self._device) / 2**30,
        )  # fmt: skip
        return report

    def add(self, key: GraphKey) -> bool:
        """Capture one graph, in place of the one of this key if there is one; False: `failed` says why it could not."""
        if self._device.type == "cuda" and self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        self.failed.pop(key, None)
        try:
            graph = Graph(
                key, self._adapter.capacity(key.axis_keys, key.token_budget),
                self._adapter, self._model, self._device, self._pool,
            )  # fmt: skip
            if self._book.cost_ms(key) is None:
                self._book.note(key, self._measure_ms(graph))
        except (RuntimeError, EncoderPoolError, LookupError) as error:  # no memory; keys that no axis has
            self.failed[key] = f"{type(error).__name__}: {error}"
            logger.exception("could not capture %s; items that need it run eagerly", key)
            self._clear_cache()
            return False
        if 0 < graph.shared_bytes <= graph.grown_bytes:  # the pool had no room for it
            self._spread = graph.grown_bytes / graph.shared_bytes
        graph.shared_bytes = int(self._spread * graph.shared_bytes)
        self.graphs[key] = graph
        if len(self.known) >= MAX_KNOWN:
            self.known.pop(next(iter(self.known)))
        self.known[key] = self._view(graph)
        self._scratch[graph.pool] = self._scratch.get(graph.pool, 0) + graph.grown_bytes
        self._forget_empty_pools()
        return True

    def drop(self, key: GraphKey) -> None:
        """Release one graph; its scratch returns once no other graph shares that pool."""
        del self.graphs[key]
        self._forget_empty_pools()
        self._release_memory()

    def start_pool(self) -> None:
        """Let later captures share a new pool of scratch; the old one returns once no graph is in it."""
        self._pool = None

    def outside_pool(self) -> list[GraphKey]:
        """Graphs that keep an older pool of scratch alive."""
        return [key for key, graph in self.graphs.items() if graph.pool != self._pool]

    def memory(self) -> GraphMemory:
        """What the graphs take and what is left."""
        own = sum(graph.num_bytes for graph in self.graphs.values())
        free: int | None = None
        if self._device.type == "cuda":
            cached = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
            free = free_bytes(self._device) + max(0, cached - sum(self._scratch.values()))
        return GraphMemory(
            used_bytes=own + sum(self._scratch.values()),
            scratch_bytes=self._scratch.get(self._pool, 0) if self._pool is not None else 0,
            free_bytes=free,
        )

    def views(self) -> list[GraphView]:
        """Every graph with its cost."""
        return [self._view(graph) for graph in self.graphs.values()]

    def known_views(self) -> tuple[GraphView, ...]:
        """Every graph that was ever captured, with what is known of its cost now."""
        return tuple(replace(view, cost_ms=self._book.cost_ms(key) or 0.0) for key, view in self.known.items())

    def failed_axis_keys(self) -> set[AxisKeys]:
        """Axis keys of which a capture failed."""
        return {key.axis_keys for key in self.failed}

    def _view(self, graph: Graph) -> GraphView:
        return graph.view(self._book.cost_ms(graph.key) or 0.0)

    def _forget_empty_pools(self) -> None:
        in_use = {graph.pool for graph in self.graphs.values()}
        self._scratch = {pool: num_bytes for pool, num_bytes in self._scratch.items() if pool in in_use}

    def _measure_ms(self, graph: Graph) -> float:
        """Median time of a replay that is as full as typical segments make it."""
        sample = self._adapter.sample(graph.key.axis_keys)
        most = min(graph.capacity.segments, graph.capacity.tokens)
        num_segments = len(take([sample.shape] * most, graph.capacity))
        graph.load([sample] * num_segments, self._adapter)
        return run_ms(graph.replay, self._device)

    def _clear_cache(self) -> None:
        if self._device.type == "cuda":
            gc.collect()  # takes tens to hundreds of milliseconds: not between replays of traffic
            self._release_memory()

    def _release_memory(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # runs under way may use what is freed or captured next
            torch.cuda.empty_cache()
