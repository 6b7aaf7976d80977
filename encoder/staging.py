"""A ring of staging slots between host and device, so that copy-in, compute and copy-out of three launches overlap."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from weakref import WeakKeyDictionary

import numpy as np
import torch

from encoder.arena import ArenaLayout
from encoder.blocks import LIMIT_BYTES, Block, BlockPool


class Slot:
    """Buffers of one launch: host bytes in, the same bytes on the device, output on the device and on the host."""

    def __init__(self, device: torch.device, blocks: BlockPool) -> None:
        self._device, self._blocks = device, blocks
        empty = torch.empty(0, dtype=torch.uint8)
        self.device_in = self._host_in = self._device_out = self._own_out = empty
        self._block: Block | None = (
            None  # of the output; without one it arrives in `_own_out`, and its reader gets a copy
        )
        self._out_bytes = 0
        self._arrays: WeakKeyDictionary[ArenaLayout, dict[str, np.ndarray]] = WeakKeyDictionary()
        if device.type == "cuda":
            self._arrived = torch.cuda.Event()
            self._begun = torch.cuda.Event(enable_timing=True)
            self._computed = torch.cuda.Event(enable_timing=True)
            self._returned = torch.cuda.Event(blocking=True)
        self._elapsed_ms = 0.0

    def reserve(self, in_bytes: int, out_bytes: int) -> None:
        """Grow to these sizes. Only between launches of this slot."""
        on_gpu = self._device.type == "cuda"
        if len(self._host_in) < in_bytes:
            self._host_in = torch.zeros(in_bytes, dtype=torch.uint8, pin_memory=on_gpu)
            self.device_in = self._host_in.to(self._device)  # on a CPU: the same memory
            self._arrays.clear()
        self._block = self._blocks.take(out_bytes)
        if self._block is None and len(self._own_out) < out_bytes:
            self._own_out = torch.empty(out_bytes, dtype=torch.uint8, pin_memory=on_gpu)
        if not on_gpu:
            self._device_out = self._host_out
        elif len(self._device_out) < out_bytes:
            self._device_out = torch.empty(out_bytes, dtype=torch.uint8, device=self._device)
        self._out_bytes = out_bytes

    @property
    def _host_out(self) -> torch.Tensor:
        """Where the output arrives."""
        return self._own_out if self._block is None else self._block.memory

    def arrays(self, layout: ArenaLayout) -> dict[str, np.ndarray]:
        """The fields of a launch's input, in host memory."""
        found = self._arrays.get(layout)
        if found is None:
            found = self._arrays[layout] = layout.arrays(self._host_in)
        return found

    def keep(self, output: torch.Tensor) -> None:
        """Copy the output aside: the next replay overwrites it."""
        self._device_out[: output.nbytes].view(output.dtype).view(output.shape).copy_(output)

    def wait(self, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """Wait until the output is on the host; memory that is its reader's as long as any of it is held."""
        if self._device.type == "cuda":
            self._returned.synchronize()
            self._elapsed_ms = self._begun.elapsed_time(self._computed)
        block, self._block = self._block, None
        arrived = self._own_out[: self._out_bytes].clone() if block is None else block.lend()
        return arrived[: self._out_bytes].view(dtype).view(shape)

    def give_up(self) -> None:
        """The launch failed half way: its copies may be under way still."""
        if self._block is not None:
            self._block.give_up()

    def returned(self) -> bool:
        """Whether `wait` would return at once."""
        return self._device.type != "cuda" or bool(self._returned.query())

    def elapsed_ms(self) -> float:
        """Compute time of the launch that `wait` ended."""
        return self._elapsed_ms


class StagingRing:
    """Slots, and on CUDA the three streams they pass through."""

    def __init__(self, device: torch.device, num_slots: int, *, limit_bytes: int = LIMIT_BYTES) -> None:
        """`limit_bytes` bounds the memory that readers of outputs hold; beyond it they get copies."""
        self._device, self._blocks = device, BlockPool(pinned=device.type == "cuda", limit_bytes=limit_bytes)
        self._num_slots = num_slots
        self._free = [Slot(device, self._blocks) for _ in range(num_slots)]
        if device.type == "cuda":
            self._copy_in, self._compute, self._copy_out = (torch.cuda.Stream(device) for _ in range(3))

    @property
    def is_idle(self) -> bool:
        """No launch is under way."""
        return len(self._free) == self._num_slots

    @contextmanager
    def slot(self, in_bytes: int, out_bytes: int) -> Iterator[Slot]:
        """A free slot with this much room. It stays taken until `returning`, unless the body fails."""
        assert self._free, "more launches under way than slots: finish one first"
        slot = self._free.pop()
        try:
            slot.reserve(in_bytes, out_bytes)
            yield slot
        except BaseException:
            self._replace(slot)
            raise

    @contextmanager
    def returning(self, slot: Slot) -> Iterator[None]:
        """Read a slot's output in the body, then give the slot back."""
        try:
            yield
        except BaseException:
            self._replace(slot)
            raise
        self._free.append(slot)

    def _replace(self, slot: Slot) -> None:
        """A launch failed half way: copies of its slot may be under way still, so a new one takes its place."""
        slot.give_up()
        self._free.append(Slot(self._device, self._blocks))

    @contextmanager
    def computing(self, slot: Slot, in_bytes: int) -> Iterator[None]:
        """Copy the slot's input in before the body and its output out after it; the body runs on the compute stream."""
        if self._device.type != "cuda":
            started_s = perf_counter()
            yield
            slot._elapsed_ms = (perf_counter() - started_s) * 1e3
            return
        with torch.cuda.stream(self._copy_in):
            slot.device_in[:in_bytes].copy_(slot._host_in[:in_bytes], non_blocking=True)
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
