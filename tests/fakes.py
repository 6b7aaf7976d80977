"""Stand-ins for what is slow or hard to break on purpose: a runner without torch work, and a pool without Ray."""

from __future__ import annotations

import io
import math
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from PIL import Image

from cluster.config import PoolConfig
from encoder.adapters.base import EncoderAdapter, Segment
from encoder.config import EncoderConfig
from encoder.graphs import CaptureReport, GraphMemory
from encoder.media import MediaHeader, probe_header
from encoder.packing import EagerCost, GraphTable, GraphView, Replay, plan_replay
from encoder.runner import EncoderRunner
from encoder.runner_stats import RunnerStats
from encoder.types import AxisKeys, Capacity, GraphKey, Grid, ItemShape, SegmentShape
from workers.config import WorkerConfig
from workers.messages import EncodeBatch, EncodeItem, EncodeResult, WorkerReport, WorkerState, WorkerStats

TILE = 100  # pixels of width that one segment covers
TOKENS = 2  # of each segment
HIDDEN = 4


class FakeAdapter:
    """Cuts an image into columns; a segment is 10 patches wide and as tall as the image in tens of pixels."""

    encoder, path, hidden_size = "fake", "image", HIDDEN

    def checkpoint_config(self) -> dict[str, Any]:
        return {"model_type": "fake"}

    def probe(self, header: MediaHeader) -> ItemShape:
        grids = ((1, max(1, header.height // 10), 10),) * math.ceil(header.width / TILE)
        shapes = [self.measure(grid) for grid in grids]
        return ItemShape(
            grids=grids,
            num_patches=sum(shape.num_patches for shape in shapes),
            num_tokens=sum(shape.num_tokens for shape in shapes),
        )

    def measure(self, grid: Grid) -> SegmentShape:
        return SegmentShape(grid=grid, num_patches=math.prod(grid), num_tokens=TOKENS)

    def prepare(self, image: Image.Image) -> list[Segment]:
        shape = self.probe(MediaHeader(width=image.width, height=image.height))
        brightness = np.asarray(image)[0, 0, 0]
        return [
            Segment(shape=self.measure(grid), patches_PC=np.full((math.prod(grid), 3), brightness, np.uint8))
            for grid in shape.grids
        ]

    def axis_choices(self, grid: Grid) -> list[AxisKeys]:
        return [("packed",)]

    def capacity(self, axis_keys: AxisKeys, token_budget: int) -> Capacity:
        return graph(token_budget).capacity


def graph(budget: int = 16, *, cost_ms: float = 10.0, longest: int = 10_000) -> GraphView:
    """A packed graph of the fake encoder."""
    capacity = Capacity(patches=longest * 2, segments=budget // TOKENS, tokens=budget, longest=longest)
    key = GraphKey(encoder="fake@float32", path="image", axis_keys=("packed",), token_budget=budget)
    return GraphView(key=key, capacity=capacity, cost_ms=cost_ms)


class FakeLaunch(list[Segment]):
    """A run under way until the gate opens."""

    def __init__(self, segments: Sequence[Segment], gate: threading.Event) -> None:
        super().__init__(segments)
        self._gate = gate

    @property
    def done(self) -> bool:
        return self._gate.is_set()

    def wait(self) -> None:
        assert self._gate.wait(20), "the test forgot to open the gate"


class FakeRunner:
    """The surface of `EncoderRunner` that a worker uses. A segment's tokens all hold its brightness."""

    encoder_id = "fake@float32"
    device = torch.device("cpu")
    dtype = torch.float32
    config = EncoderConfig(model="fake")
    weights_digest = b""
    eager: EagerCost | None = None
    cost_error: float | None = None

    def __init__(self, views: Sequence[GraphView] = (graph(),)) -> None:
        self.adapter = FakeAdapter()
        self.stats = RunnerStats()
        self.views = list(views)
        self.known = {view.key: view for view in views}
        self.break_capture: Callable[[GraphKey], str | None] = lambda key: None
        self.runs: list[tuple[GraphKey | None, list[Segment]]] = []
        self.break_run: Callable[[Sequence[Segment], Replay], Exception | None] = lambda segments, replay: None
        self.gate = threading.Event()  # closed: `finish` waits
        self.gate.set()
        self.max_under_way = 0
        self._under_way = 0

    def capture(self) -> CaptureReport:
        return CaptureReport(num_graphs=len(self.views), seconds=0.5, num_bytes=0)

    def graph_views(self) -> tuple[GraphView, ...]:
        return tuple(self.views)

    def known_graphs(self) -> tuple[GraphView, ...]:
        return tuple(self.known.values())

    def graph_memory(self) -> GraphMemory:
        used = sum(view.num_bytes for view in self.views)
        return GraphMemory(used_bytes=used, scratch_bytes=0, free_bytes=None)

    def outside_pool(self) -> list[GraphKey]:
        return []

    def forget_stats(self) -> None:
        self.stats = RunnerStats()

    def add(self, key: GraphKey) -> str | None:
        failure = self.break_capture(key)
        if failure is None:
            self.known.setdefault(key, graph(key.token_budget))
            self.views.append(self.known[key])
        return failure

    def plan(self, pending: Sequence[SegmentShape]) -> Replay:
        adapter = self.adapter
        return plan_replay(pending, GraphTable(self.views, adapter.axis_choices, adapter.measure), eager_patches=10_000)

    def submit(self, segments: Sequence[Segment], replay: Replay) -> FakeLaunch:
        error = self.break_run(segments, replay)
        if error is not None:
            raise error
        self._under_way += 1
        self.max_under_way = max(self.max_under_way, self._under_way)
        self.runs.append((replay.key, list(segments)))
        if replay.key is None:
            self.stats.eager_runs += 1
        else:
            self.stats.uses[replay.key].replays += 1
            self.stats.uses[replay.key].segments += len(segments)
        return FakeLaunch(segments, self.gate)

    def finish(self, launch: FakeLaunch) -> list[torch.Tensor]:
        launch.wait()
        self._under_way -= 1
        return [torch.full((TOKENS, HIDDEN), float(segment.patches_PC[0, 0])) for segment in launch]

    def drop(self, key: GraphKey) -> None:
        assert self._under_way == 0, "a launch may be of this graph"
        self.views = [view for view in self.views if view.key != key]


def fake_adapter() -> EncoderAdapter:
    return cast(EncoderAdapter, FakeAdapter())


def loader(runner: FakeRunner) -> Callable[[WorkerConfig], EncoderRunner]:
    """What `EncoderWorker` takes as `load`."""
    return lambda config: cast(EncoderRunner, runner)


def picture(brightness: int, width: int = TILE, height: int = 100) -> bytes:
    """A grey PNG; the fake runner returns its brightness."""
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), (brightness,) * 3).save(buffer, format="PNG")
    return buffer.getvalue()


def item(lease_id: int, encoded: bytes, *, timeout_s: float | None = None) -> EncodeItem:
    """A wire item whose header was probed as the client does."""
    header = probe_header(encoded, max_pixels=10**9, max_bytes=10**9)
    return EncodeItem(
        lease_id=lease_id,
        encoded=np.frombuffer(encoded, np.uint8),
        shape=FakeAdapter().probe(header),
        timeout_s=timeout_s,
    )


def batch(*encoded: bytes, call_id: str = "call", timeout_s: float | None = None) -> EncodeBatch:
    items = tuple(item(lease_id, data, timeout_s=timeout_s) for lease_id, data in enumerate(encoded))
    return EncodeBatch(call_id=call_id, items=items)


def errors(result: EncodeResult) -> list[str | None]:
    return [None if answer.error is None else answer.error.name for answer in result.items]


def breaks_on(brightness: int, error: Exception) -> Callable[[Sequence[Segment], Replay], Exception | None]:
    return lambda segments, replay: (
        error if any(segment.patches_PC[0, 0] == brightness for segment in segments) else None
    )


def until(condition: Callable[[], bool]) -> None:
    limit_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < limit_s
        time.sleep(0.005)


def report(
    worker_id: str,
    *,
    incarnation: str | None = None,
    state: WorkerState = WorkerState.READY,
    graphs: tuple[GraphView, ...] = (graph(),),
    max_queue_ms: float = 100.0,
    **changes: Any,
) -> WorkerReport:
    """What a worker would tell the router."""
    return WorkerReport(
        worker_id=worker_id,
        incarnation=incarnation or f"{worker_id}/0",
        state=state,
        graphs=graphs,
        max_queue_ms=max_queue_ms,
        **{
            "error": None,
            "device": "cpu",
            "gpu_uuid": None,
            "host": "here",
            "pid": 1,
            "encoder": "fake@float32",
            "model": "fake",
            "eager_ms_per_patch": 0.05,
            "max_queue_bytes": 2**30,
            "backlog_ms": 0.0,
            "backlog_bytes": 0,
            "num_waiting": 0,
            "stats": WorkerStats(),
            **changes,
        },
    )


@dataclass
class Clock:
    """A clock turned by hand."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


def tiny_config(
    *,
    num_workers: int = 2,
    model: str = "tiny-minicpmv-2.6",
    worker: dict[str, object] | None = None,
    **changes: object,
) -> PoolConfig:
    """A pool of CPU workers with a small real model."""
    return PoolConfig.model_validate(
        {
            "num_workers": num_workers,
            "worker": {
                "device": "cpu",
                "torch_threads": 1,  # fewer cores than the tests' Ray says
                "encoder": EncoderConfig(model=model),
                "report_interval_s": 0.2,
                **(worker or {}),
            },
            "cpus_per_worker": 0.5,
            "start_timeout_s": 90,
            "items_per_call": 4,
            **changes,
        }
    )


def heed_interrupts() -> None:
    """As from a terminal: what a shell starts in the background ignores them, and so do its children."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
