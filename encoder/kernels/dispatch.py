"""Which implementation of a kernel runs for a tensor."""

from __future__ import annotations

import functools
import importlib.util

import torch


@functools.cache
def triton_is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def runs_on_triton(x: torch.Tensor) -> bool:
    """True where the Triton kernels serve `x`: a CUDA tensor, with Triton installed."""
    return x.is_cuda and triton_is_installed()


@functools.cache
def is_hopper(device_index: int) -> bool:
    """True for compute capability 9.0 (H100, H200), whose tensor cores `hopper_attention.cu` is written for."""
    return torch.cuda.get_device_capability(device_index) == (9, 0)
