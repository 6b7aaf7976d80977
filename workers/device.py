"""The device that a worker's process has: what runs on it, and its identity."""

from __future__ import annotations

import torch

from encoder.errors import WorkerStartError
from encoder.runner import EncoderRunner
from workers.config import WorkerConfig


def load_runner(config: WorkerConfig) -> EncoderRunner:
    """The runner that a configuration asks for, on this process's device.

    Raises WorkerStartError where there is no such device, and as `EncoderRunner.from_config` does.
    """
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise WorkerStartError("worker.device is cuda and this process sees no GPU; use cpu or auto")
    if device == "cuda" and config.gpu_memory_share < 1:
        torch.cuda.set_per_process_memory_fraction(config.gpu_memory_share, 0)
    return EncoderRunner.from_config(config.encoder, "cuda:0" if device == "cuda" else "cpu")


def gpu_uuid(device: torch.device) -> str | None:
    """Identity of the GPU, whatever number this process knows it by."""
    if device.type != "cuda":
        return None
    return str(torch.cuda.get_device_properties(device).uuid)
