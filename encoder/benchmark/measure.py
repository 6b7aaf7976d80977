"""Timing on a device: medians, a sustained matmul peak, memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import cache

import torch


def wait(device: torch.device) -> None:
    """Until the device has nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of one run, the device idle before and after it."""
    wait(device)
    started_s = time.perf_counter()
    run()
    wait(device)
    return time.perf_counter() - started_s


def wall_seconds(run: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    """Seconds of each run; one run before them warms up."""
    run()
    return [seconds_of(run, device) for _ in range(repeats)]


class DeviceTimer:
    """Time that the device spends on what the body launches; on a CPU, the body's time."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._start, self._end = 0.0, 0.0
        if self._on_gpu:
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def __enter__(self) -> DeviceTimer:
        if self._on_gpu:
            self._events[0].record()
        self._start = time.perf_counter()
        return self

    def __exit__(self, *exc: object) -> None:
        self._end = time.perf_counter()
        if self._on_gpu:
            self._events[1].record()

    def elapsed_ms(self) -> float:
        """Milliseconds; on a GPU it waits for the body's work to end."""
        if not self._on_gpu:
            return (self._end - self._start) * 1e3
        self._events[1].synchronize()
        elapsed: float = self._events[0].elapsed_time(self._events[1])
        return elapsed


@cache
def matmul_peak(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of square matmuls on random numbers, kept up for a while, so that clocks settle as under load.

    Measured once a process.
    """
    seconds = 4.0 if device.type == "cuda" else 0.5
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
