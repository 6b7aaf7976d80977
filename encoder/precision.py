"""The numbers that an encoder computes with: the dtype that `auto` means, and whether the device has a precision."""

from __future__ import annotations

import torch

from encoder.config import Precision
from encoder.errors import ConfigError


def check_precision(precision: Precision, device: torch.device, dtype: torch.dtype) -> None:
    """Raise ConfigError where this precision can't be had."""
    if precision == "native":
        return
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        raise ConfigError(f"precision {precision!r} needs a GPU of compute capability 9.0 (Hopper) or later")
    if dtype != torch.bfloat16:
        raise ConfigError(f"precision {precision!r} goes with dtype bfloat16, not {dtype}")


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype that `auto` means: bfloat16 on a GPU, float32 on a CPU."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype: torch.dtype = getattr(torch, name)
    return dtype
