"""transformers' own rules, out of modules that cannot be imported without torchvision."""

from __future__ import annotations

import ast
import math
import random
from collections import defaultdict
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from encoder.media import MediaHeader


def functions_of(file: str, names: set[str], **known: Any) -> dict[str, Any]:
    """Functions and methods of these names in a source file below transformers' `models`."""
    source = Path(transformers.__file__).parent / "models" / file
    nodes: list[Any] = [node for node in ast.walk(ast.parse(source.read_text())) if getattr(node, "name", "") in names]
    space: dict[str, Any] = {
        "torch": torch, "np": np, "math": math, "defaultdict": defaultdict, "lru_cache": lru_cache, **known
    }  # fmt: skip
    future = ast.ImportFrom(module="__future__", names=[ast.alias("annotations")], level=0)
    exec(compile(ast.fix_missing_locations(ast.Module(body=[future, *nodes], type_ignores=[])), source, "exec"), space)
    return space


def rule_of(file: str, names: set[str], **attributes: Any) -> Any:
    """An object with these methods of a class in the file, and these attributes."""
    space = functions_of(file, names)
    return type("Rule", (), {name: space[name] for name in names} | attributes)()


def random_sizes(count: int, *, least: int = 4, most: int = 12) -> list[tuple[int, int]]:
    """Sides between these powers of two."""
    rng = random.Random(0)
    return [(round(2 ** rng.uniform(least, most)), round(2 ** rng.uniform(least, most))) for _ in range(count)]


def random_clips(count: int, seed: int) -> list[MediaHeader]:
    """From four frames to half an hour or more."""
    rng = random.Random(seed)
    return [
        MediaHeader(
            width=rng.randint(60, 3000),
            height=rng.randint(60, 3000),
            num_frames=round(math.exp(rng.uniform(math.log(4), math.log(60_000)))),
            frames_per_s=rng.choice([15.0, 24.0, 23.976, 25.0, 29.97, 30.0, 60.0]),
        )
        for _ in range(count)
    ]
