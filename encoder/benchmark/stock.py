"""The engine bench of families on transformers' modules: our graphs beside the same modules, one image at a time.

The eager loop runs what our graphs hold, without graphs and alone: no masks, and the fastest attention there is for the
image. Padded grids do not apply: tiles have one size, and nobody pads the other towers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from encoder.adapters.base import EncoderModel, Segment
from encoder.adapters.grids import GridAdapter
from encoder.adapters.registry import load_adapter, resolve_model
from encoder.adapters.tiles import TileAdapter
from encoder.arena import ArenaLayout
from encoder.benchmark.measure import matmul_peak
from encoder.benchmark.rows import Report, Row, baseline_row, report_beside_eager
from encoder.benchmark.workloads import FlopsOf, Workload, choose, image_workloads
from encoder.config import EncoderConfig
from encoder.errors import ConfigError
from encoder.precision import resolve_dtype
from encoder.towers.stock import GridModel
from encoder.weights import obtain_tensors

Benched = TileAdapter | GridAdapter

MOST_RATIO = 50  # of sides: some processors refuse strips

# Torch's counter knows attention on a GPU alone.
CPU_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda query, key, value, *_, **__: sdpa_flop_count(
        query, key, value
    )
}


def bench_stock(config: EncoderConfig, device_name: str, *, repeats: int = 5, only: Sequence[str] = ()) -> Report:
    """Measure our engine and the eager loops on one device.

    Raises:
        ConfigError: a model that has no baselines here.
    """
    device = torch.device(device_name)
    dtype, on_gpu = resolve_dtype(config.dtype, device), device.type == "cuda"
    adapter = load_adapter(config)
    if not isinstance(adapter, Benched):
        raise ConfigError(f"bench engine has no baselines for {config.model!r}")
    weights = obtain_tensors(resolve_model(config.model).snapshot, adapter.weight_shapes(), seed=config.seed)
    with torch.inference_mode():
        if isinstance(adapter, TileAdapter):
            model = adapter.build(weights, device, dtype, "sdpa", config.precision)
            loops = {"eager, sdpa": EagerLoop(adapter, model, device)}
        else:
            # Plain attention for images of one segment, FlashAttention 2 (on a GPU) for what has several.
            alone = GridModel(adapter.family, weights, device, dtype, "sdpa", attending="alone")
            loops = {"eager, sdpa": EagerLoop(adapter, alone, device)}
            ragged = GridModel(
                adapter.family, weights, device, dtype, "varlen" if on_gpu else "sdpa", attending="ragged"
            )
            loops["eager, ragged"] = EagerLoop(adapter, ragged, device)
    flops_of = loops["eager, sdpa"].flops_of()
    workloads = choose(image_workloads(adapter, flops_of, small=not on_gpu, most_ratio=MOST_RATIO), only)
    peak = matmul_peak(device, dtype)
    rows: list[Row] = []
    for engine, loop in loops.items():
        for workload in workloads:
            if engine == "eager, sdpa" and isinstance(adapter, GridAdapter) and _has_several(workload):
                continue
            rows.append(baseline_row(engine, loop.encode, device, workload, peak, repeats, {}))
    loops.clear()
    return report_beside_eager(config, device_name, "graphs", rows, workloads, peak=peak, repeats=repeats)


def _has_several(workload: Workload) -> bool:
    return any(len(image) > 1 for image in workload.images)


class EagerLoop:
    """transformers' modules, eagerly, all segments of one image in a forward, or those of each view; their pixels go
    through page-locked buffers. An image's tokens must be fetched before the next one is encoded."""

    def __init__(self, adapter: Benched, model: EncoderModel, device: torch.device) -> None:
        self.adapter, self.model, self.device = adapter, model, device
        self._buffers: dict[tuple[int, int], Tensor] = {}  # by a run's place in its image, and size

    @torch.inference_mode()
    def encode(self, image: Sequence[Segment]) -> Tensor:
        """Tokens `[T, E]` on the device."""
        runs = groupby(image, key=lambda segment: self.adapter.axis_choices(segment.shape.grid))
        parts = [self._run(list(run), place) for place, (_, run) in enumerate(runs)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _run(self, segments: Sequence[Segment], place: int) -> Tensor:
        axis_keys, capacity = self.adapter.exact([segment.shape for segment in segments])
        layout = ArenaLayout.of(self.adapter.inputs(axis_keys, capacity))
        host = self._buffer(place, layout.num_bytes)
        self.adapter.fill(layout.arrays(host), segments, axis_keys, capacity)
        block = host.to(self.device, non_blocking=True)
        num_tokens = sum(segment.shape.num_tokens for segment in segments)
        return self.model.forward(layout.views(block), axis_keys, capacity)[:num_tokens]

    def _buffer(self, place: int, num_bytes: int) -> Tensor:
        if (place, num_bytes) not in self._buffers:
            on_gpu = self.device.type == "cuda"
            self._buffers[place, num_bytes] = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=on_gpu)
        return self._buffers[place, num_bytes]

    def flops_of(self) -> FlopsOf:
        """What segments ask of the model: so much a tile, or linear and quadratic in their patches, which two sizes
        determine."""
        samples = [self.adapter.sample((key,)) for key in self.adapter.axes[0].keys]
        if not isinstance(self.adapter, GridAdapter):
            each = {sample.shape.grid: self._count(sample) for sample in samples}
            return lambda shapes: sum(each[shape.grid] for shape in shapes)
        few, first = samples[0].shape.num_patches, self._count(samples[0])
        double = self.adapter.sample((self.adapter.axes[0].keys[0],), scale=2)
        many, second = double.shape.num_patches, self._count(double)
        quadratic = (second / many - first / few) / (many - few)
        linear = first / few - quadratic * few
        return lambda shapes: sum(linear * shape.num_patches + quadratic * shape.num_patches**2 for shape in shapes)

    def _count(self, segment: Segment) -> float:
        with FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION) as counter:
            self.encode((segment,))
        return float(counter.get_total_flops())
