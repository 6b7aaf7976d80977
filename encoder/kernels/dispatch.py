"""Which implementation of a kernel runs for a tensor."""

from __future__ import annotations

import functools
import importlib.util
import logging

import torch

from encoder.kernels.nvrtc import nvrtc

logger = logging.getLogger(__name__)


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


@functools.cache
def cuda_compiles() -> bool:
    """True where torch brought NVRTC, which compiles the CUDA sources."""
    try:
        nvrtc()
    except OSError as error:
        logger.warning("no NVRTC, attention runs in Triton instead: %s", error)
        return False
    return True
