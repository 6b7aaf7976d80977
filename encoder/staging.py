"""A ring of staging slots between host and device, so that copy-in, compute and copy-out of three launches overlap."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

import torch


class Slot:
    """Buffers of one launch: host bytes in, the same bytes on the device, output on the device and on the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        empty = torch.empty(0, dtype=torch.uint8)
        self.host_in = self.device_in = self._device_out = self._host_out = empty
        self._out_bytes = 0
        if device.type == "cuda":
            self._arrived = torch.cuda.Event()
            self._begun = torch.cuda.Event(enable_timing=True)
            self._computed = torch.cuda.Event(enable_timing=True)
            self._returned = torch.cuda.Event(blocking=True)
        self._elapsed_ms = 0.0

    def reserve(self, in_bytes: int, out_bytes: int) -> None:
        """Grow to these sizes. Only between launches of this slot."""
        on_gpu = self._device.type == "cuda"
        if self.host_in.numel() < in_bytes:
            self.host_in = torch.zeros(in_bytes, dtype=torch.uint8, pin_memory=on_gpu)
            self.device_in = self.host_in.to(self._device)  # on a CPU: the same memory
        if self._host_out.numel() < out_bytes:
            self._host_out = torch.empty(out_bytes, dtype=torch.uint8, pin_memory=on_gpu)
            self._device_out = torch.empty_like(self._host_out, device=self._device) if on_gpu else self._host_out
        self._out_bytes = out_bytes

    def keep(self, output: torch.Tensor) -> None:
        """Copy the output aside: the next replay overwrites it."""
        self._device_out[: output.nbytes].view(output.dtype).view(output.shape).copy_(output)

    def wait(self, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """Wait until the output is on the host; a tensor of its own memory."""
        if self._device.type == "cuda":
            self._returned.synchronize()
            self._elapsed_ms = self._begun.elapsed_time(self._computed)
        return self._host_out[: self._out_bytes].view(dtype).view(shape).clone()

    def returned(self) -> bool:
        """Whether `wait` would return at once."""
        return self._device.type != "cuda" or bool(self._returned.query())

    def elapsed_ms(self) -> float:
        """Compute time of the launch that `wait` ended."""
        return self._elapsed_ms


class StagingRing:
    """Slots, and on CUDA the three streams they pass through."""

    def __init__(self, device: torch.device, num_slots: int) -> None:
        self._device = device
        self._free = [Slot(device) for _ in range(num_slots)]
        if device.type == "cuda":
            self._copy_in, self._compute, self._copy_out = (torch.cuda.Stream(device) for _ in range(3))

    @contextmanager
    def slot(self, in_bytes: int, out_bytes: int) -> Iterator[Slot]:
        """A free slot with this much room. It stays taken until `returning`, unless the body fails."""
        assert self._free, "more launches under way than slots: finish one first"
        slot = self._free.pop()
        try:
            slot.reserve(in_bytes, out_bytes)
            yield slot
        except BaseException:
            self._replace()
            raise

    @contextmanager
    def returning(self, slot: Slot) -> Iterator[None]:
        """Read a slot's output in the body, then give the slot back."""
        try:
            yield
        except BaseException:
            self._replace()
            raise
        self._free.append(slot)

    def _replace(self) -> None:
        """A launch failed half way: copies of its slot may be under way still, so a new one takes its place."""
        self._free.append(Slot(self._device))

    @contextmanager
    def computing(self, slot: Slot, in_bytes: int) -> Iterator[None]:
        """Copy the slot's input in before the body and its output out after it; the body runs on the compute stream."""
        if self._device.type != "cuda":
            started_s = perf_counter()
            yield
            slot._elapsed_ms = (perf_counter() - started_s) * 1e3
            return
        with torch.cuda.stream(self._copy_in):
            slot.device_in[:in_bytes].copy_(slot.host_in[:in_bytes], non_blocking=True)
            slot._arrived.record()
        with torch.cuda.stream(self._compute):
            self._compute.wait_event(slot._arrived)
            slot._begun.record()
            yield
            slot._computed.record()
        with torch.cuda.stream(self._copy_out):
            self._copy_out.wait_event(slot._computed)
            out_bytes = slot._out_bytes
            slot._host_out[:out_bytes].copy_(slot._device_out[:out_bytes], non_blocking=True)
            slot._returned.record()
