"""What graphs and eager runs take: milliseconds and device memory, measured when graphs are captured."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from encoder.adapters.base import EncoderAdapter, EncoderModel, Segment
from encoder.arena import ArenaLayout
from encoder.packing import EagerCost
from encoder.types import AxisKeys

REPEATS = 3


def run_ms(run: Callable[[], None], device: torch.device) -> float:
    """Median time of a run on the device."""
    if device.type != "cuda":
        started_s = time.perf_counter()
        run()
        return (time.perf_counter() - started_s) * 1e3
    times: list[float] = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def measure_eager(
    adapter: EncoderAdapter, model: EncoderModel, device: torch.device, axis_keys: AxisKeys, most_patches: int
) -> EagerCost:
    """Fit the time of eager runs to one typical segment of these axis keys and to as many as an eager run may join."""
    sample = adapter.sample(axis_keys)
    many = max(2, most_patches // sample.shape.num_patches)
    (few_patches, few_ms), (patches, ms) = (_eager_ms(adapter, model, device, [sample] * count) for count in (1, many))
    ms_per_patch = max(0.0, (ms - few_ms) / (patches - few_patches))
    return EagerCost(base_ms=max(0.0, few_ms - ms_per_patch * few_patches), ms_per_patch=ms_per_patch)


def _eager_ms(
    adapter: EncoderAdapter, model: EncoderModel, device: torch.device, segments: Sequence[Segment]
) -> tuple[int, float]:
    """Patches and milliseconds of an eager run."""
    axis_keys, capacity = adapter.exact([segment.shape for segment in segments])
    layout = ArenaLayout.of(adapter.inputs(axis_keys, capacity))
    host = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    adapter.fill(layout.arrays(host), segments, axis_keys, capacity)
    inputs = layout.views(host.to(device))
    model.reserve(capacity.longest)

    def run() -> None:
        model.forward(inputs, axis_keys, capacity)

    run()
    return sum(segment.shape.num_patches for segment in segments), run_ms(run, device)


def free_bytes(device: torch.device) -> int:
    """Device memory that nobody holds; 0 on a CPU, where nobody counts."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else 0


def bytes_outside_torch(device: torch.device) -> int:
    """Device memory in use that torch's allocator did not hand out: recordings, loaded kernels, other processes."""
    free, total = torch.cuda.mem_get_info(device)
    return int(total - free - torch.cuda.memory_reserved(device))


def scratch_bytes(forward: Callable[[], torch.Tensor], device: torch.device) -> int:
    """Device memory that a forward takes on top of its output while it runs. Runs it once."""
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    output = forward()
    return max(0, torch.cuda.max_memory_allocated(device) - before - output.nbytes)
