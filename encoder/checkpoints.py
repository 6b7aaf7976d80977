"""`encpool init-checkpoint`: any preset as a checkpoint in the released layout."""

from __future__ import annotations

from pathlib import Path

import torch

from encoder.adapters.registry import load_adapter, resolve_model
from encoder.config import EncoderConfig
from encoder.errors import ConfigError
from encoder.weights import random_tensors, write_snapshot


def init_checkpoint(model: str, directory: Path, *, seed: int = 0) -> None:
    """Write the seeded weights of a preset, so that others can load the same numbers.

    Raises:
        ConfigError: `model` is no preset, or the directory holds something already.
    """
    if resolve_model(model).snapshot is not None:
        raise ConfigError(f"{model!r} is a checkpoint already; name a preset (`encpool models` lists them)")
    if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
        raise ConfigError(f"{directory} is not an empty directory; name a new one")
    adapter = load_adapter(EncoderConfig(model=model))
    tensors = random_tensors(adapter.weight_shapes(), seed)
    write_snapshot(directory, adapter.checkpoint_config(), tensors, torch.float32)
