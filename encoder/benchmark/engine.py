"""The engine bench: our packed and grid layouts, an eager loop and vLLM's padded grids, side by side."""

from __future__ import annotations

import logging
import platform
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import torch
import transformers

from encoder.adapters.base import Segment
from encoder.adapters.minicpmv import MiniCPMV
from encoder.adapters.registry import load_adapter, resolve_model
from encoder.benchmark.baselines import EagerLoop, PaddedGrids, Stock, transformers_tower
from encoder.benchmark.measure import DeviceTimer, matmul_peak, percentile, wall_seconds
from encoder.benchmark.preparation import Preparation, measure_preparation
from encoder.benchmark.workloads import Workload, make_workloads, useful_flops
from encoder.config import EncoderConfig
from encoder.errors import ConfigError
from encoder.runner import EncoderRunner, resolve_dtype
from encoder.towers.resampler import Resampler
from encoder.weights import obtain_tensors

logger = logging.getLogger(__name__)

MIN_SATURATED_SEGMENTS = 400  # on a GPU: so many segments a run that filling and emptying the pipeline don't count


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
    preparation: Preparation
    repeats: int
    rows: list[Row]

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


def bench_engine(config: EncoderConfig, device_name: str, *, repeats: int = 5) -> Report:
    """Measure all engines on one device.

    Raises:
        ConfigError: a model other than MiniCPM-V.
    """
    device = torch.device(device_name)
    dtype = resolve_dtype(config.dtype, device)
    adapter = _minicpmv(config)
    workloads = make_workloads(adapter, _minicpmv(config.model_copy(update={"max_slice_nums": 1})))
    if device.type != "cuda":
        workloads = [
            _taste(workload) for workload in workloads if "1920" not in workload.name and "640x" not in workload.name
        ]
    peak = matmul_peak(device, dtype, seconds=4.0 if device.type == "cuda" else 0.5)

    stock = _stock(config, adapter, device, dtype)
    loop = EagerLoop(stock)
    rows = [_baseline_row("eager loop", loop.encode, stock, workload, peak, repeats, {}) for workload in workloads]
    rates = {row.workload: row.slices_per_s for row in rows}
    rows = [replace(row, to_eager=1.0) for row in rows]
    rows += _padded_rows(stock, workloads, peak, repeats, rates)
    del stock, loop
    packed = EncoderRunner.from_config(config.model_copy(update={"layouts": ("packed",)}), device_name)
    capture = packed.capture()
    rows += [_our_row("packed", packed, workload, peak, repeats, rates) for workload in workloads]
    overlap = _overlap(packed, workloads[0], repeats)
    cosines = {"packed": _cosine(packed, config, workloads[0])}
    del packed
    if device.type == "cuda" and dtype == torch.bfloat16 and torch.cuda.get_device_capability(device) >= (9, 0):
        fast = EncoderRunner.from_config(
            config.model_copy(update={"layouts": ("packed",), "precision": "fp8"}), device_name
        )
        fast.capture()
        rows += [_our_row("packed fp8", fast, workload, peak, repeats, rates) for workload in workloads]
        cosines["packed fp8"] = _cosine(fast, config, workloads[0])
        del fast
    grid = EncoderRunner.from_config(
        _grid_config(config, adapter, workloads, on_gpu=device.type == "cuda"), device_name
    )
    grid.capture()
    rows += [_our_row("grid", grid, workload, peak, repeats, rates) for workload in workloads]
    return Report(
        model=config.model,
        dtype=str(dtype).removeprefix("torch."),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        versions={"torch": torch.__version__, "transformers": transformers.__version__},
        date=time.strftime("%Y-%m-%d"),
        peak_tflops=peak / 1e12,
        overlap=overlap,
        capture_seconds=capture.seconds,
        capture_gib=capture.num_bytes / 2**30,
        num_graphs=capture.num_graphs,
        cosines=cosines,
        preparation=measure_preparation(adapter),
        repeats=repeats,
        rows=rows,
    )


def _minicpmv(config: EncoderConfig) -> MiniCPMV:
    adapter = load_adapter(config)
    if not isinstance(adapter, MiniCPMV):
        raise ConfigError(f"bench engine has baselines for MiniCPM-V, not for {config.model!r}")
    return adapter


def _taste(workload: Workload) -> Workload:
    """Its two images of the fewest and squarest slices, for a CPU."""
    images = sorted(workload.images, key=lambda image: (len(image), max(max(s.shape.grid) for s in image)))[:2]
    return Workload(name=workload.name, images=tuple(images), saturated=workload.saturated)


def _grid_config(config: EncoderConfig, adapter: MiniCPMV, workloads: list[Workload], *, on_gpu: bool) -> EncoderConfig:
    """Exact rectangles for the commonest grids of the workloads, and packed for the rest."""
    most, ladder = (12, (1, 2, 4, 8, 16)) if on_gpu else (2, (1, 2))
    counts = Counter(segment.shape.grid for workload in workloads for segment in workload.segments)
    exact = tuple(f"{rows}x{columns}" for (_, rows, columns), _ in counts.most_common(most))
    budgets = tuple(segments * adapter.sizes.queries for segments in ladder)
    return config.model_copy(update={"layouts": (*exact, "packed"), "token_budgets": dict.fromkeys(exact, budgets)})


# --- our engine ---


def _our_row(
    engine: str, runner: EncoderRunner, workload: Workload, peak: float, repeats: int, eager_rates: dict[str, float]
) -> Row:
    segments = workload.segments
    if workload.saturated and runner.device.type == "cuda":
        segments = segments * -(-MIN_SATURATED_SEGMENTS // len(segments))
    latencies_ms: list[float] = []
    runner.encode(segments)
    useful, run = runner.stats.useful_patches, runner.stats.replayed_patches
    on_device: list[float] = []

    def encode() -> None:
        started_s = time.perf_counter()
        _, launches = runner.encode_traced(segments)
        latencies_ms.append((time.perf_counter() - started_s) * 1e3)
        on_device.append(sum(launch.elapsed_ms for launch in launches))

    seconds = wall_seconds(encode, runner.device, repeats if workload.saturated else 6 * repeats)
    fill = (runner.stats.useful_patches - useful) / max(1, runner.stats.replayed_patches - run)
    return _row(
        engine, runner.adapter, workload, len(segments), seconds, latencies_ms, on_device, fill, peak, eager_rates
    )


def _overlap(runner: EncoderRunner, workload: Workload, repeats: int) -> float:
    """End-to-end throughput, host bytes to host embeddings, over that of the same replays back to back."""
    segments = workload.segments * (8 if runner.device.type == "cuda" else 1)
    _, launches = runner.encode_traced(segments)
    graphs = [launch.replay.key for launch in launches if launch.replay.key is not None]
    assert len(graphs) == len(launches), "the traffic runs in graphs alone"

    def replay_all() -> None:
        for key in graphs:
            runner.replay_again(key)

    ratios = []
    for _ in range(repeats):  # in turns, so that clocks are the same for both
        bare = wall_seconds(replay_all, runner.device, 1)[0]
        whole = wall_seconds(lambda: runner.encode(segments), runner.device, 1)[0]
        ratios.append(bare / whole)
    return statistics.median(ratios)


def _cosine(runner: EncoderRunner, config: EncoderConfig, workload: Workload) -> tuple[float, float]:
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


# --- baselines ---


def _stock(config: EncoderConfig, adapter: MiniCPMV, device: torch.device, dtype: torch.dtype) -> Stock:
    snapshot = resolve_model(config.model).snapshot
    weights = obtain_tensors(snapshot, adapter.weight_shapes(), seed=config.seed)
    ours = {name: tensor for name, tensor in weights.items() if name.startswith("resampler.")}
    return Stock(adapter, transformers_tower(adapter, weights, device, dtype), Resampler(ours, device, dtype), device)


def _padded_rows(
    stock: Stock, workloads: list[Workload], peak: float, repeats: int, eager_rates: dict[str, float]
) -> list[Row]:
    grids = PaddedGrids(stock)
    rows = []
    for workload in workloads:
        keys = [grids.key(image) for image in workload.images]
        images = tuple(image for image, key in zip(workload.images, keys, strict=True) if key is not None)
        if not images:
            continue
        held = Workload(name=workload.name, images=images, saturated=workload.saturated)
        fill = held.num_patches / sum(area * budget for area, budget in filter(None, keys))
        row = _baseline_row("padded grids", grids.encode, stock, held, peak, repeats, eager_rates)
        rows.append(replace(row, fill=fill))
    return rows


def _baseline_row(
    engine: str,
    encode: Callable[[tuple[Segment, ...]], torch.Tensor | None],
    stock: Stock,
    workload: Workload,
    peak: float,
    repeats: int,
    eager_rates: dict[str, float],
) -> Row:
    latencies_ms: list[float] = []
    on_device: list[float] = []

    def encode_all() -> None:
        total_ms = 0.0
        for image in workload.images:
            started_s = time.perf_counter()
            with DeviceTimer(stock.device) as timer:
                tokens = encode(image)
            assert tokens is not None
            tokens.cpu()
            latencies_ms.append((time.perf_counter() - started_s) * 1e3)
            total_ms += timer.elapsed_ms()
        on_device.append(total_ms)

    seconds = wall_seconds(encode_all, stock.device, repeats)
    warm_ms = latencies_ms[len(workload.images) :]
    longest = [len(image) * max(segment.shape.num_patches for segment in image) for image in workload.images]
    fill = workload.num_patches / sum(longest)
    num_slices = len(workload.segments)
    return _row(engine, stock.adapter, workload, num_slices, seconds, warm_ms, on_device[1:], fill, peak, eager_rates)


def _row(
    engine: str, adapter: object, workload: Workload, num_slices: int, seconds: list[float], latencies_ms: list[float],
    on_device_ms: list[float], fill: float, peak: float, eager_rates: dict[str, float],
) -> Row:  # fmt: skip
    assert isinstance(adapter, MiniCPMV)
    rounds = num_slices / len(workload.segments)
    rate = num_slices / statistics.median(seconds)
    flops = rounds * useful_flops(adapter, [segment.shape for segment in workload.segments])
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
