"""The engine bench of any model: our graphs beside its baselines, and of several models their ratios side by side."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator, Sequence

import torch

from encoder.adapters.minicpmv import MiniCPMV
from encoder.adapters.qwen_vl import QwenVL
from encoder.adapters.registry import load_adapter
from encoder.benchmark.minicpmv import bench_minicpmv
from encoder.benchmark.qwen_vl import bench_qwen
from encoder.benchmark.rows import Report
from encoder.benchmark.stock import bench_stock
from encoder.config import EncoderConfig
from encoder.errors import EncoderPoolError

logger = logging.getLogger(__name__)


def bench_engine(config: EncoderConfig, device_name: str, *, repeats: int = 5, only: Sequence[str] = ()) -> Report:
    """Measure all engines of one model on one device; of its workloads, those whose names hold one of `only`."""
    adapter = load_adapter(config)
    if isinstance(adapter, MiniCPMV):
        return bench_minicpmv(config, device_name, repeats=repeats, only=only)
    if isinstance(adapter, QwenVL):
        return bench_qwen(config, device_name, repeats=repeats, only=only)
    return bench_stock(config, device_name, repeats=repeats, only=only)


def bench_engines(
    configs: Sequence[EncoderConfig], device_name: str, *, repeats: int = 5, only: Sequence[str] = ()
) -> Iterator[tuple[str, Report | None]]:
    """Measure one model after another: its name, and its report, or None where it failed and the log says why.

    Raises:
        ConfigError: of any of them, before the first is measured.
    """
    for config in configs:
        load_adapter(config)
    for config in configs:
        try:
            yield config.model, bench_engine(config, device_name, repeats=repeats, only=only)
        except (RuntimeError, AssertionError, LookupError, TypeError, ValueError, EncoderPoolError):
            logger.exception("the bench of %s failed", config.model)
            yield config.model, None
        gc.collect()  # a model's graphs and weights go before the next one's come
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
