"""One block of bytes that holds all input buffers of a run, so that a single copy moves them to the device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from encoder.adapters.base import TensorSpec

ALIGNMENT = 256


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class ArenaLayout:
    """Where each field lies. `pixels` comes last, so that a copy may stop after the rows in use."""

    specs: Mapping[str, TensorSpec]
    offsets: Mapping[str, int]
    num_bytes: int

    @classmethod
    def of(cls, specs: Mapping[str, TensorSpec]) -> ArenaLayout:
        """Lay the fields out one after the other."""
        assert list(specs)[-1] == "pixels"
        offsets, end = {}, 0
        for name, spec in specs.items():
            offsets[name] = -(-end // ALIGNMENT) * ALIGNMENT
            end = offsets[name] + math.prod(spec.shape) * np.dtype(spec.dtype).itemsize
        return cls(specs=specs, offsets=offsets, num_bytes=max(end, 1))

    def used_bytes(self, pixel_rows: int) -> int:
        """Bytes up to the end of the first `pixel_rows` rows of pixels."""
        spec = self.specs["pixels"]
        row_bytes = math.prod(spec.shape[1:]) * np.dtype(spec.dtype).itemsize
        return self.offsets["pixels"] + pixel_rows * row_bytes

    def views(self, block: torch.Tensor) -> dict[str, torch.Tensor]:
        """The fields as tensors inside a uint8 block."""
        return {name: self._view(block, name, spec) for name, spec in self.specs.items()}

    def _view(self, block: torch.Tensor, name: str, spec: TensorSpec) -> torch.Tensor:
        dtype = getattr(torch, spec.dtype)
        start = self.offsets[name]
        end = start + math.prod(spec.shape) * dtype.itemsize
        return block[start:end].view(dtype).view(spec.shape)

    def arrays(self, block: torch.Tensor) -> dict[str, np.ndarray]:
        """The fields as numpy arrays inside a uint8 block of host memory."""
        return {name: view.numpy() for name, view in self.views(block).items()}
