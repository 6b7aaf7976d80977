"""What a configuration asks for, and whether it could work, without a GPU, Ray or a network."""

from __future__ import annotations

from pathlib import Path

from cluster.config import PoolConfig
from cluster.gateway.auth import read_tokens
from cluster.groups import GroupConfig
from cluster.planning.traces import check_trace
from encoder.adapters.registry import check_model, families
from encoder.budgets import graph_keys
from encoder.config import EncoderConfig

AUTO_DTYPES = {"cuda": "bfloat16", "cpu": "float32"}  # by device, in the order in which one is looked for


def describe_config(config: PoolConfig) -> str:
    """One line on the pool.

    Raises:
        ConfigError: a model, layout or budget that cannot work; a tokens file that the gateway would not take, or a
            trace file that cannot be written.
        WeightsError: a local checkpoint without some of its tensors, or their files.
    """
    if config.gateway.tokens_file is not None:
        read_tokens(config.gateway.tokens_file)
    if config.trace_file is not None:
        check_trace(config.trace_file)
    return f"ok: {'; '.join(_describe(group) for group in config.worker_groups)}"


def _describe(group: GroupConfig) -> str:
    encoder, device = group.worker.encoder, group.worker.device
    graphs = _graphs(encoder, "cpu" if device == "cpu" else "cuda")
    limits = group.autoscale
    number = group.num_workers if limits is None else f"{limits.min_workers} to {limits.max_workers}"
    devices = tuple(AUTO_DTYPES) if device == "auto" else (device,)
    numbers = (AUTO_DTYPES[one] if encoder.dtype == "auto" else encoder.dtype for one in devices)
    where = " or ".join(f"in {dtype} on {one}" for dtype, one in zip(numbers, devices, strict=True))
    return f"{number} x {encoder.model} {where}, {graphs}"


def _graphs(encoder: EncoderConfig, device: str) -> str:
    if not _is_here(encoder.model):
        return f"layouts {', '.join(encoder.layouts)} (its graphs cannot be counted before the checkpoint is here)"
    adapter = check_model(encoder)
    if not encoder.graphs:
        return "no graphs"
    keys = graph_keys(adapter, encoder, adapter.encoder, device)
    layouts = dict.fromkeys("+".join(map(str, key.axis_keys)) for key in keys)
    return f"{len(keys)} graphs a worker over {', '.join(layouts)}"


def _is_here(model: str) -> bool:
    """Whether a model can be looked at without a network; a wrong name counts as here, so that it is named."""
    presets = {preset for family in families().values() for preset in family.presets}
    return model in presets or Path(model).expanduser().is_dir() or model.count("/") != 1
