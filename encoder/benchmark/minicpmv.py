"""The engine bench of MiniCPM-V: our packed and grid layouts, an eager loop and vLLM's padded grids, side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from encoder.adapters.minicpmv import MiniCPMV
from encoder.adapters.registry import load_adapter, resolve_model
from encoder.benchmark.measure import matmul_peak
from encoder.benchmark.minicpmv_baselines import EagerLoop, PaddedGrids, Stock, transformers_tower
from encoder.benchmark.preparation import measure_preparation
from encoder.benchmark.rows import Report, Row, baseline_row, cosine, make_report, our_row, overlap
from encoder.benchmark.workloads import VIDEO_FRAMES, VIDEO_SIZE, Workload, choose, image_workloads, prepared
from encoder.config import EncoderConfig
from encoder.pictures import draw_picture
from encoder.precision import resolve_dtype
from encoder.runner import EncoderRunner
from encoder.towers.resampler import Resampler
from encoder.types import SegmentShape
from encoder.weights import obtain_tensors


def bench_minicpmv(config: EncoderConfig, device_name: str, *, repeats: int = 5, only: Sequence[str] = ()) -> Report:
    """Measure all engines on one device."""
    device = torch.device(device_name)
    dtype, on_gpu = resolve_dtype(config.dtype, device), device.type == "cuda"
    adapter = _minicpmv(config)
    frames_adapter = _minicpmv(config.model_copy(update={"max_slice_nums": 1}))
    workloads = choose(make_workloads(adapter, frames_adapter, small=not on_gpu), only)
    peak = matmul_peak(device, dtype)

    stock = _stock(config, adapter, device, dtype)
    loop = EagerLoop(stock)
    rows = [
        baseline_row("eager loop", loop.encode, stock.device, workload, peak, repeats, {}) for workload in workloads
    ]
    rates = {row.workload: row.slices_per_s for row in rows}
    rows = [replace(row, to_eager=1.0) for row in rows]
    rows += _padded_rows(stock, workloads, peak, repeats, rates)
    del stock, loop
    packed = EncoderRunner.from_config(config.model_copy(update={"layouts": ("packed",)}), device_name)
    capture = packed.capture()
    rows += [our_row("packed", packed, workload, peak, repeats, rates) for workload in workloads]
    overlapped = overlap(packed, workloads[0], repeats)
    cosines = {"packed": cosine(packed, config, workloads[0])}
    del packed
    if on_gpu and dtype == torch.bfloat16 and torch.cuda.get_device_capability(device) >= (9, 0):
        fast = EncoderRunner.from_config(
            config.model_copy(update={"layouts": ("packed",), "precision": "fp8"}), device_name
        )
        fast.capture()
        rows += [our_row("packed fp8", fast, workload, peak, repeats, rates) for workload in workloads]
        cosines["packed fp8"] = cosine(fast, config, workloads[0])
        del fast
    grid = EncoderRunner.from_config(_grid_config(config, adapter, workloads, on_gpu=on_gpu), device_name)
    grid.capture()
    rows += [our_row("grid", grid, workload, peak, repeats, rates) for workload in workloads]
    return make_report(
        config,
        device,
        peak=peak,
        capture=capture,
        overlapped=overlapped,
        cosines=cosines,
        preparation=measure_preparation(adapter, repeats=15 if on_gpu else 2),
        repeats=repeats,
        rows=rows,
    )


def make_workloads(adapter: MiniCPMV, frames_adapter: MiniCPMV, *, small: bool) -> list[Workload]:
    """Traffic, one image alone, random sizes, and video frames without slicing; `small`: a taste of them, for a CPU."""
    num_frames = 2 if small else VIDEO_FRAMES
    video = Workload(
        name="video",
        images=prepared(lambda seed: frames_adapter.prepare(draw_picture(*VIDEO_SIZE, seed)), range(num_frames)),
        saturated=True,
        flops_of=partial(useful_flops, frames_adapter),
    )
    return [*image_workloads(adapter, partial(useful_flops, adapter), small=small), video]


def _minicpmv(config: EncoderConfig) -> MiniCPMV:
    adapter = load_adapter(config)
    assert isinstance(adapter, MiniCPMV)
    return adapter


def _grid_config(config: EncoderConfig, adapter: MiniCPMV, workloads: list[Workload], *, on_gpu: bool) -> EncoderConfig:
    """Exact rectangles for the commonest grids of the workloads, and packed for the rest."""
    most, ladder = (12, (1, 2, 4, 8, 16)) if on_gpu else (2, (1, 2))
    counts = Counter(segment.shape.grid for workload in workloads for segment in workload.segments)
    exact = tuple(f"{rows}x{columns}" for (_, rows, columns), _ in counts.most_common(most))
    budgets = tuple(segments * adapter.sizes.queries for segments in ladder)
    return config.model_copy(update={"layouts": (*exact, "packed"), "token_budgets": dict.fromkeys(exact, budgets)})


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
        held = replace(workload, images=images)
        fill = held.num_patches / sum(area * budget for area, budget in filter(None, keys))
        row = baseline_row("padded grids", grids.encode, stock.device, held, peak, repeats, eager_rates)
        rows.append(replace(row, fill=fill))
    return rows


def useful_flops(adapter: MiniCPMV, shapes: Sequence[SegmentShape]) -> float:
    """Multiplications and additions that these segments ask of tower and resampler, as released, pads left out.

    What does not depend on the image (the projection of the queries) is not counted.
    """
    sizes = adapter.sizes
    width, tokens, queries = sizes.width, sizes.token_width, sizes.queries
    layers = sizes.num_layers - sizes.drop_last_layer
    per_patch = 2 * sizes.patch_bytes * width + layers * 2 * (4 * width**2 + 2 * width * sizes.mlp_width)
    per_patch += 2 * width * tokens + 2 * 2 * tokens**2 + 4 * queries * tokens  # projection, K and V, cross-attention
    per_slice = 2 * 2 * queries * tokens**2  # output projections of the tokens
    return sum(shape.num_patches * (per_patch + layers * 4 * shape.num_patches * width) + per_slice for shape in shapes)
