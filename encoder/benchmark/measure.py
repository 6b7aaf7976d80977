"""Timing on a device: medians, a sustained matmul peak, memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


def wait(device: torch.device) -> None:
    """Until the device has nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def wall_seconds(run: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    """Seconds of each run, the device idle before and after it; one run before them warms up."""
    run()
    times = []
    for _ in range(repeats):
        wait(device)
        started_s = time.perf_counter()
        run()
        wait(device)
        times.append(time.perf_counter() - started_s)
    return times


def device_ms(run: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    """Milliseconds that the device spends on each run; on a CPU, the time it takes."""
    if device.type != "cuda":
        return [seconds * 1e3 for seconds in wall_seconds(run, device, repeats)]
    run()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return times


def matmul_peak(device: torch.device, dtype: torch.dtype, *, seconds: float) -> float:
    """FLOP/s of square matmuls on random numbers, kept up for a while, so that clocks settle as under load."""
    side = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    a @ b
    wait(device)
    rates: list[float] = []
    started_s = time.perf_counter()
    while not rates or time.perf_counter() - started_s < seconds:
        chunk_s = time.perf_counter()
        for _ in range(50 if device.type == "cuda" else 3):
            a @ b
        wait(device)
        rates.append(2 * side**3 * (50 if device.type == "cuda" else 3) / (time.perf_counter() - chunk_s))
    return statistics.median(rates[len(rates) // 2 :])


def percentile(values: list[float], share: float) -> float:
    """The value below which `share` of them lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]
