"""Captured graphs: static inputs, one recorded forward, static outputs; and the set of them that a worker holds.

Two backends behave alike. `cuda` records a torch.cuda.CUDAGraph and replays it. `static` (CPU) keeps the same buffers,
the same padding and the same output, and runs the forward at each replay, so that all but the recording is exercised
without a GPU.
"""

from __future__ import annotations

import gc
import itertools
import logging
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from encoder.adapters.base import EncoderAdapter, EncoderModel, Segment
from encoder.arena import ArenaLayout
from encoder.budgets import token_budgets
from encoder.config import EncoderConfig
from encoder.errors import ConfigError
from encoder.packing import EagerCost, GraphView, take
from encoder.types import AxisKeys, Capacity, GraphKey

logger = logging.getLogger(__name__)

MANY_GRAPHS = 64


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
        self.key, self.capacity = key, capacity
        self.layout = ArenaLayout.of(adapter.inputs(key.axis_keys, capacity))
        self._model = model
        # Zeros are valid everywhere: no rows, position 0. Never-written pad rows must not hold NaN.
        self.block = torch.zeros(self.layout.num_bytes, dtype=torch.uint8, device=device)
        self._inputs = self.layout.views(self.block)
        self._cuda_graph: torch.cuda.CUDAGraph | None = None
        model.reserve(capacity.longest)
        if device.type == "cuda":
            for _ in range(2):  # libraries choose algorithms and allocate workspaces on first use
                self._forward()
            torch.cuda.synchronize(device)
            self._cuda_graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._cuda_graph, pool=pool):
                self.output_TE = self._forward()
        else:
            self.output_TE = self._forward()
        self.cost_ms = 0.0  # of a full replay, as measured by the graph set; its GraphTable learns from there

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

    def view(self) -> GraphView:
        """What others need to know of it."""
        return GraphView(key=self.key, capacity=self.capacity, cost_ms=self.cost_ms)


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


class GraphSet:
    """The graphs that one worker holds."""

    def __init__(self, adapter: EncoderAdapter, model: EncoderModel, device: torch.device) -> None:
        self._adapter, self._model, self._device = adapter, model, device
        self.graphs: dict[GraphKey, Graph] = {}
        self.failed: dict[GraphKey, str] = {}
        self._pool: Any = None  # memory that all its CUDA graphs share

    def capture(self, keys: Iterable[GraphKey]) -> CaptureReport:
        """Capture the keys in the order given, largest first; one that fails is left out and the rest go on."""
        wanted = list(keys)
        if len(wanted) > MANY_GRAPHS:
            logger.warning("capturing %d graphs; each holds memory of its own, consider fewer keys", len(wanted))
        self._clear_cache()  # what others have freed must not count as ours
        started_s, free_bytes = time.monotonic(), self._free_bytes()
        if self._device.type == "cuda" and self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        for number, key in enumerate(wanted):
            try:
                # Largest first: later captures reuse the pool that the first one sized.
                graph = Graph(
                    key, self._adapter.capacity(key.axis_keys, key.token_budget),
                    self._adapter, self._model, self._device, self._pool,
                )  # fmt: skip
                graph.cost_ms = self._measure_ms(graph)
            except (RuntimeError, torch.OutOfMemoryError) as error:
                self.failed[key] = f"{type(error).__name__}: {error}"
                logger.exception("could not capture %s; items that need it run eagerly", key)
                self._clear_cache()
                continue
            self.graphs[key] = graph
            if number == 0 and len(wanted) > MANY_GRAPHS:
                held = free_bytes - self._free_bytes()
                logger.warning("the first of %d graphs took %.2f GiB", len(wanted), held / 2**30)
        self._clear_cache()
        report = CaptureReport(
            num_graphs=len(self.graphs),
            seconds=time.monotonic() - started_s,
            num_bytes=max(0, free_bytes - self._free_bytes()),
            failed=dict(self.failed),
        )
        logger.info(
            "captured %d graphs in %.1f s, %.2f GiB, %.2f GiB left",
            report.num_graphs, report.seconds, report.num_bytes / 2**30, self._free_bytes() / 2**30,
        )  # fmt: skip
        return report

    def drop(self, key: GraphKey) -> None:
        """Release one graph; its memory returns once no other graph shares its part of the pool."""
        del self.graphs[key]
        self._clear_cache()

    def failed_axis_keys(self) -> set[AxisKeys]:
        """Axis keys of which a capture failed."""
        return {key.axis_keys for key in self.failed}

    def measure_eager(self, most_patches: int) -> EagerCost:
        """Fit the time of eager runs to one typical segment and to as many as an eager run may join."""
        sample = self._adapter.sample(next(iter(self.graphs)).axis_keys)
        many = max(2, most_patches // sample.shape.num_patches)
        (few_patches, few_ms), (patches, ms) = (self._eager_ms([sample] * count) for count in (1, many))
        ms_per_patch = max(0.0, (ms - few_ms) / (patches - few_patches))
        return EagerCost(base_ms=max(0.0, few_ms - ms_per_patch * few_patches), ms_per_patch=ms_per_patch)

    def _eager_ms(self, segments: Sequence[Segment]) -> tuple[int, float]:
        """Patches and milliseconds of an eager run."""
        axis_keys, capacity = self._adapter.exact([segment.shape for segment in segments])
        layout = ArenaLayout.of(self._adapter.inputs(axis_keys, capacity))
        host = torch.zeros(layout.num_bytes, dtype=torch.uint8)
        self._adapter.fill(layout.arrays(host), segments, axis_keys, capacity)
        inputs = layout.views(host.to(self._device))
        self._model.reserve(capacity.longest)

        def run() -> None:
            self._model.forward(inputs, axis_keys, capacity)

        run()
        return sum(segment.shape.num_patches for segment in segments), self._time_ms(run)

    def _measure_ms(self, graph: Graph) -> float:
        """Median time of a replay that is as full as typical segments make it."""
        sample = self._adapter.sample(graph.key.axis_keys)
        most = min(graph.capacity.segments, graph.capacity.tokens)
        num_segments = len(take([sample.shape] * most, graph.capacity))
        graph.load([sample] * num_segments, self._adapter)
        return self._time_ms(graph.replay)

    def _time_ms(self, run: Callable[[], None], repeats: int = 3) -> float:
        """Median time of a run."""
        if self._device.type != "cuda":
            started_s = time.perf_counter()
            run()
            return (time.perf_counter() - started_s) * 1e3
        times: list[float] = []
        for _ in range(repeats):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        return statistics.median(times)

    def _free_bytes(self) -> int:
        if self._device.type != "cuda":
            return 0
        free_bytes, _ = torch.cuda.mem_get_info(self._device)
        return free_bytes

    def _clear_cache(self) -> None:
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # runs under way may use what is freed or captured next
            torch.cuda.empty_cache()
