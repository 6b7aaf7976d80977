"""Rows of an engine bench: one engine on one workload, measured; and the report that holds them."""

from __future__ import annotations

import math
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch
import transformers

from encoder.adapters.base import Segment
from encoder.benchmark.measure import DeviceTimer, percentile, seconds_of, wall_seconds
from encoder.benchmark.preparation import Preparation
from encoder.benchmark.workloads import Workload
from encoder.config import EncoderConfig
from encoder.graphs import CaptureReport
from encoder.precision import resolve_dtype
from encoder.runner import EncoderRunner

RUN_S = 1.0  # of a saturated run on a GPU: so long that filling and emptying the pipeline hardly count


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One engine on one workload; medians of the repetitions."""

    engine: str
    workload: str
    slices_per_s: float
    patches_per_s: float  # useful ones
    peak_share: float  # of the matmul peak, by useful rows
    fill: float  # useful rows over rows run
    p50_ms: float  # one image alone: latency from host to host; saturated: of one run of segments
    p99_ms: float
    device_ms: float  # one image alone, on the device; saturated: per run of segments
    to_eager: float  # throughput over the eager loop's
    memory_gib: float  # allocated on the device


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything a bench printed, and what it ran on."""

    model: str
    dtype: str
    device: str
    versions: dict[str, str]
    date: str
    peak_tflops: float
    overlap: float  # end-to-end throughput over that of back-to-back replays
    capture_seconds: float
    capture_gib: float
    num_graphs: int
    cosines: dict[str, tuple[float, float]]  # least and median over tokens, against float32
    preparation: Preparation | None
    repeats: int
    rows: list[Row]

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


def make_report(
    config: EncoderConfig,
    device: torch.device,
    *,
    peak: float,
    capture: CaptureReport,
    overlapped: float,
    cosines: dict[str, tuple[float, float]],
    preparation: Preparation | None,
    repeats: int,
    rows: list[Row],
) -> Report:
    """A report with what it ran on. `peak`: the matmul peak in FLOP/s."""
    return Report(
        model=config.model,
        dtype=str(resolve_dtype(config.dtype, device)).removeprefix("torch."),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        versions={"torch": torch.__version__, "transformers": transformers.__version__},
        date=time.strftime("%Y-%m-%d"),
        peak_tflops=peak / 1e12,
        overlap=overlapped,
        capture_seconds=capture.seconds,
        capture_gib=capture.num_bytes / 2**30,
        num_graphs=capture.num_graphs,
        cosines=cosines,
        preparation=preparation,
        repeats=repeats,
        rows=rows,
    )


def report_beside_eager(
    config: EncoderConfig,
    device_name: str,
    engine: str,
    eager: Sequence[Row],
    workloads: Sequence[Workload],
    *,
    peak: float,
    repeats: int,
    run_s: float = RUN_S,
) -> Report:
    """Measure our graphs beside eager rows; ratios are to the fastest eager engine of each workload."""
    rates: dict[str, float] = {}
    for row in eager:
        rates[row.workload] = max(rates.get(row.workload, 0.0), row.slices_per_s)
    rows = [replace(row, to_eager=row.slices_per_s / rates[row.workload]) for row in eager]
    runner = EncoderRunner.from_config(config, device_name)
    capture = runner.capture()
    rows += [our_row(engine, runner, each, peak, repeats, rates, run_s=run_s) for each in workloads]
    return make_report(
        config,
        torch.device(device_name),
        peak=peak,
        capture=capture,
        overlapped=overlap(runner, workloads[0], repeats),
        cosines={engine: cosine(runner, config, min(workloads, key=lambda workload: len(workload.images)))},
        preparation=None,
        repeats=repeats,
        rows=rows,
    )


def our_row(
    engine: str,
    runner: EncoderRunner,
    workload: Workload,
    peak: float,
    repeats: int,
    eager_rates: Mapping[str, float],
    *,
    run_s: float = RUN_S,
) -> Row:
    """Our engine, host to host; a saturated run takes some `run_s` seconds on a GPU, or once the workload."""
    segments = _run_segments(runner, workload, run_s)
    latencies_ms: list[float] = []
    useful, run = runner.stats.useful_patches, runner.stats.replayed_patches
    on_device: list[float] = []

    def encode() -> None:
        started_s = time.perf_counter()
        _, launches = runner.encode_traced(segments)
        latencies_ms.append((time.perf_counter() - started_s) * 1e3)
        on_device.append(sum(launch.elapsed_ms for launch in launches))

    seconds = [seconds_of(encode, runner.device) for _ in range(repeats if workload.saturated else 6 * repeats)]
    fill = (runner.stats.useful_patches - useful) / max(1, runner.stats.replayed_patches - run)
    return _row(engine, workload, len(segments), seconds, latencies_ms, on_device, fill, peak, eager_rates)


def _run_segments(runner: EncoderRunner, workload: Workload, run_s: float) -> list[Segment]:
    """What a run encodes; the runner is warm behind it."""
    segments = workload.segments
    encode = partial(runner.encode, segments)
    encode()
    if not workload.saturated or runner.device.type != "cuda":
        return segments
    return segments * max(1, round(run_s / seconds_of(encode, runner.device)))


def overlap(runner: EncoderRunner, workload: Workload, repeats: int) -> float:
    """End-to-end throughput, host bytes to host embeddings, over that of the same replays back to back.

    Not a number where images come alone, or part of the workload runs eagerly.
    """
    if not workload.saturated:
        return math.nan
    segments = _run_segments(runner, workload, RUN_S)
    _, launches = runner.encode_traced(segments)
    graphs = [launch.replay.key for launch in launches if launch.replay.key is not None]
    if len(graphs) < len(launches):
        return math.nan  # some of it ran eagerly, which was faster

    def replay_all() -> None:
        for key in graphs:
            runner.replay_again(key)

    ratios = []
    for _ in range(repeats):  # in turns, so that clocks are the same for both
        bare = seconds_of(replay_all, runner.device)
        ratios.append(bare / seconds_of(partial(runner.encode, segments), runner.device))
    return statistics.median(ratios)


def cosine(runner: EncoderRunner, config: EncoderConfig, workload: Workload) -> tuple[float, float]:
    """Least and median cosine of tokens against the same model in float32, eagerly."""
    segments = [image[0] for image in workload.images]
    exact = EncoderRunner.from_config(
        config.model_copy(update={"dtype": "float32", "precision": "native", "graphs": False}), str(runner.device)
    )
    cosines = torch.cat(
        [
            torch.nn.functional.cosine_similarity(ours.float(), wanted, dim=1)
            for ours, wanted in zip(runner.encode(segments), exact.encode(segments), strict=True)
        ]
    )
    return float(cosines.min()), float(cosines.median())


def baseline_row(
    engine: str,
    encode: Callable[[tuple[Segment, ...]], torch.Tensor | None],
    device: torch.device,
    workload: Workload,
    peak: float,
    repeats: int,
    eager_rates: Mapping[str, float],
) -> Row:
    """A baseline that takes one image after another and keeps their tokens on the device."""
    latencies_ms: list[float] = []
    on_device: list[float] = []

    def encode_all() -> None:
        total_ms = 0.0
        for image in workload.images:
            started_s = time.perf_counter()
            with DeviceTimer(device) as timer:
                tokens = encode(image)
            assert tokens is not None
            tokens.cpu()
            latencies_ms.append((time.perf_counter() - started_s) * 1e3)
            total_ms += timer.elapsed_ms()
        on_device.append(total_ms)

    seconds = wall_seconds(encode_all, device, repeats)
    warm_ms = latencies_ms[len(workload.images) :]
    longest = [len(image) * max(segment.shape.num_patches for segment in image) for image in workload.images]
    fill = workload.num_patches / sum(longest)
    num_slices = len(workload.segments)
    return _row(engine, workload, num_slices, seconds, warm_ms, on_device[1:], fill, peak, eager_rates)


def _row(
    engine: str, workload: Workload, num_slices: int, seconds: list[float], latencies_ms: list[float],
    on_device_ms: list[float], fill: float, peak: float, eager_rates: Mapping[str, float],
) -> Row:  # fmt: skip
    rounds = num_slices / len(workload.segments)
    rate = num_slices / statistics.median(seconds)
    flops = rounds * workload.flops
    return Row(
        engine=engine,
        workload=workload.name,
        slices_per_s=rate,
        patches_per_s=rounds * workload.num_patches / statistics.median(seconds),
        peak_share=flops / statistics.median(seconds) / peak,
        fill=fill,
        p50_ms=percentile(latencies_ms, 0.5),
        p99_ms=percentile(latencies_ms, 0.99),
        device_ms=statistics.median(on_device_ms),
        to_eager=rate / eager_rates[workload.name] if workload.name in eager_rates else float("nan"),
        memory_gib=torch.cuda.memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0,
    )
