"""`encpool bench change`: what one saturated worker goes on doing while it changes its graphs."""

from __future__ import annotations

import io
import itertools
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cluster.tables import aligned
from encoder.adapters.registry import load_adapter
from encoder.benchmark.files import two_panels
from encoder.errors import WorkerStartError
from encoder.media import probe_header
from encoder.pictures import Size, draw_picture
from encoder.types import GraphKey
from workers.config import WorkerConfig
from workers.messages import EncodeBatch, EncodeItem, EncodeResult, WorkerState
from workers.worker import EncoderWorker

SIZES: tuple[Size, ...] = ((448, 448), (640, 480), (336, 336))
START_TIMEOUT_S, CHANGE_TIMEOUT_S = 300.0, 300.0


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Throughput in items per second."""

    model: str
    device: str
    before: float
    during: float
    after: float
    change_s: float
    num_captures: int
    num_drops: int
    capture_ms: float  # one capture, on average
    worst_distance: float  # of an item's tokens during the change from those before it, relative
    cost_error: float | None  # median |predicted - real| / real of runs, before the change


def measure_change(config: WorkerConfig, *, seconds: float = 5.0, num_threads: int = 4, num_items: int = 16) -> Figures:
    """Saturate a worker, then let it drop every second graph and capture one of another budget for each.

    Args:
        seconds: how long to measure before the change, and after it.
        num_threads: calls at once.
        num_items: of a call.

    Raises:
        WorkerStartError: the worker could not start, or not change in time.
    """
    config = config.model_copy(update={"max_queue_ms": 1e6, "cache_bytes": 0, "encode_calls": 64})
    worker = EncoderWorker(config, "bench")
    worker.start()
    try:
        if worker.wait_started(START_TIMEOUT_S) is not WorkerState.READY:
            raise WorkerStartError(f"the worker could not start: {worker.report().error}")
        return _measure(worker, _items(config, num_items), seconds, num_threads)
    finally:
        worker.close()


def other_graphs(held: Sequence[GraphKey]) -> tuple[GraphKey, ...]:
    """Every second graph replaced by one with room for a smallest one's tokens more, or so many that nobody has it."""
    step = min(key.token_budget for key in held)
    ordered = sorted(held, key=lambda key: (str(key.axis_keys), key.token_budget))
    wanted, taken = ordered[::2], set(held)
    for key in ordered[1::2]:
        while key in taken:
            key = replace(key, token_budget=key.token_budget + step)
        taken.add(key)
        wanted.append(key)
    return tuple(wanted)


def _items(config: WorkerConfig, num_items: int) -> tuple[EncodeItem, ...]:
    adapter, limits = load_adapter(config.encoder), config.encoder
    items = []
    for number in range(num_items):
        buffer = io.BytesIO()
        draw_picture(*SIZES[number % len(SIZES)], number).save(buffer, format="JPEG", quality=90)
        encoded = buffer.getvalue()
        header = probe_header(encoded, max_pixels=limits.max_pixels, max_bytes=limits.max_bytes)
        items.append(EncodeItem(lease_id=number, encoded=np.frombuffer(encoded, np.uint8), shape=adapter.probe(header)))
    return tuple(items)


def _measure(worker: EncoderWorker, items: tuple[EncodeItem, ...], seconds: float, num_threads: int) -> Figures:
    expected = _tokens(worker.encode(EncodeBatch(call_id="first", items=items)))
    held = [view.key for view in worker.report().graphs]
    wanted = other_graphs(held)
    stop, lock = threading.Event(), threading.Lock()
    num_done, distances = [0], [0.0]

    def encode(name: str) -> None:
        number = 0
        while not stop.is_set():
            number += 1
            tokens = _tokens(worker.encode(EncodeBatch(call_id=f"{name}-{number}", items=items)))
            worst = max(float((a - b).norm() / b.norm()) for a, b in zip(tokens, expected, strict=True))
            with lock:
                num_done[0] += len(items)
                distances[0] = max(distances[0], worst)

    def rate(work: Callable[[], object]) -> tuple[float, float]:
        started_s, before = time.monotonic(), num_done[0]
        work()
        took_s = time.monotonic() - started_s
        return (num_done[0] - before) / took_s, took_s

    threads = [threading.Thread(target=encode, args=(str(number),)) for number in range(num_threads)]
    for thread in threads:
        thread.start()
    try:
        rate(lambda: time.sleep(seconds / 2))  # caches fill, clocks settle
        before, _ = rate(lambda: time.sleep(seconds))
        cost_error, distances[0] = worker.report().cost_error, 0.0
        during, change_s = rate(lambda: _change(worker, wanted))
        after, _ = rate(lambda: time.sleep(seconds))
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    report = worker.report()
    return Figures(
        model=report.encoder,
        device=torch.cuda.get_device_name() if report.device.startswith("cuda") else report.device,
        before=before,
        during=during,
        after=after,
        change_s=change_s,
        num_captures=len(set(wanted) - set(held)),
        num_drops=len(set(held) - set(wanted)),
        capture_ms=report.capture_ms,
        worst_distance=distances[0],
        cost_error=cost_error,
    )


def _tokens(result: EncodeResult) -> list[torch.Tensor]:
    failed = next((answer.error for answer in result.items if answer.error is not None), None)
    if failed is not None:
        raise failed.to_error()
    tokens_TE = torch.from_numpy(result.tokens_TE)
    if result.dtype == "bfloat16":
        tokens_TE = tokens_TE.view(torch.bfloat16)
    offsets = result.offsets
    return [tokens_TE[start:end].float() for start, end in itertools.pairwise(offsets)]


def _change(worker: EncoderWorker, wanted: tuple[GraphKey, ...]) -> None:
    worker.apply_graphs(wanted)
    limit_s = time.monotonic() + CHANGE_TIMEOUT_S
    while True:
        change = worker.report().graph_change
        if change is not None and change.wanted == wanted and change.done:
            if change.failed:
                raise WorkerStartError(f"{change.failed[0][0]} could not be captured: {change.failed[0][1]}")
            return
        if time.monotonic() > limit_s:
            raise WorkerStartError(f"the graphs were not changed within {CHANGE_TIMEOUT_S:g} s")
        time.sleep(0.05)


def bench_change(config: WorkerConfig, *, repeats: int = 3, seconds: float = 5.0) -> dict[str, Any]:
    """All figures."""
    runs = [asdict(measure_change(config, seconds=seconds)) for _ in range(repeats)]
    return {"date": time.strftime("%Y-%m-%d"), "runs": runs}


def table(report: dict[str, Any]) -> str:
    """The figures as text."""
    runs = report["runs"]
    header = ("items/s before", "during", "after", "during / before", "took s", "captures", "drops", "a capture ms")
    rows = [
        (
            *(f"{run[name]:.1f}" for name in ("before", "during", "after")),
            f"{run['during'] / max(run['before'], 1e-9):.0%}",
            f"{run['change_s']:.1f}",
            run["num_captures"],
            run["num_drops"],
            f"{run['capture_ms']:.0f}",
        )
        for run in runs
    ]
    worst = max(run["worst_distance"] for run in runs)
    lines = [
        f"{runs[0]['model']} on {runs[0]['device']}; {report['date']}",
        aligned(header, rows, right=header),
        f"tokens during the change differ from those before it by {worst:.1e} of their length at most",
    ]
    errors = [run["cost_error"] for run in runs if run["cost_error"] is not None]
    if errors:
        lines.append(f"predicted against real time of runs: {statistics.median(errors):.1%} off in the median")
    return "\n".join(lines)


def write_plot(report: dict[str, Any], file: Path) -> None:
    """Throughput before, during and after. Raises ConfigError without matplotlib."""
    runs, phases = report["runs"], ["before", "during", "after"]
    names = [f"run {number + 1}" for number in range(len(runs))]
    with two_panels(file, (9, 4)) as (_, left, right):
        for name, run in zip(names, runs, strict=True):
            left.plot(phases, [run[phase] for phase in phases], "o-", label=name)
        left.set(ylim=0, ylabel="items/s", title="A saturated worker that changes its graphs")
        left.legend(frameon=False)
        right.bar(names, [run["change_s"] for run in runs])
        right.set(ylabel="s", title="The change")
