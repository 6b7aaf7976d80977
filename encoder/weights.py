"""Tensors of an encoder: from a released-layout snapshot, or seeded random; and writing such a snapshot."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from encoder.errors import WeightsError
from encoder.snapshots import INDEX, PROCESSOR_FILES, locate_tensors, opened, some_of

MAX_SHARD_BYTES = 2 * 2**30
DTYPES = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
NUM_SAMPLES, SAMPLE_BYTES = 64, 4096  # of a shard, in `weights_digest`


def obtain_tensors(
    snapshot: Path | None, shapes: Mapping[str, tuple[int, ...]], *, seed: int
) -> dict[str, torch.Tensor]:
    """A model's tensors: its snapshot's, or seeded random ones where it has none. Raises as `load_tensors` does."""
    return random_tensors(shapes, seed) if snapshot is None else load_tensors(snapshot, shapes)


def weights_digest(snapshot: Path | None) -> bytes:
    """Identity of a snapshot's weights: names and sizes of its shards, and samples all over each. No bytes: seeded.

    Training moves every tensor, so 64 samples of 4 KiB a shard tell two checkpoints apart without reading them.
    """
    state = hashlib.sha256()
    if snapshot is None:
        return b""
    for path in sorted(snapshot.glob("*.safetensors")):
        size = path.stat().st_size
        state.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for position in range(0, size, max(SAMPLE_BYTES, size // NUM_SAMPLES)):
                file.seek(position)
                state.update(file.read(SAMPLE_BYTES))
    return state.digest()


def load_tensors(snapshot: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Read the named tensors, opening only the shards that hold them, also under what `stored_names` takes.

    Raises:
        WeightsError: names the tensors that are missing, of another shape, quantised or not finite, or the file that
            can't be read.
    """
    shards: dict[str, dict[str, str]] = defaultdict(dict)
    for name, (shard, stored_as) in locate_tensors(snapshot, shapes).items():
        shards[shard][name] = stored_as
    tensors: dict[str, torch.Tensor] = {}
    misshapen, no_floats, not_finite = [], [], []
    for shard, names in sorted(shards.items()):
        with opened(snapshot / shard, "pt") as file:
            for name, stored_as in names.items():
                shape = tuple(file.get_slice(stored_as).get_shape())
                if shape != shapes[name]:
                    misshapen.append(f"{name} is {list(shape)}, not {list(shapes[name])}")
                    continue
                tensor = tensors[name] = file.get_tensor(stored_as)
                if tensor.dtype not in DTYPES:
                    no_floats.append(f"{name} is {str(tensor.dtype).removeprefix('torch.')}")
                elif not _is_finite(tensor):
                    not_finite.append(name)
    if misshapen:
        raise WeightsError(f"{snapshot}: {len(misshapen)} tensors have another shape: {some_of(misshapen)}")
    if no_floats:  # their scales lie elsewhere, if anywhere: taken as they stand they would give wrong embeddings
        raise WeightsError(
            f"{snapshot}: {len(no_floats)} tensors are quantised: {some_of(no_floats)}; take a checkpoint whose vision "
            f"part is in bfloat16, float16 or float32"
        )
    if not_finite:  # one picture in a thousand may meet them
        raise WeightsError(f"{snapshot}: {len(not_finite)} tensors hold NaN or infinity: {some_of(not_finite)}")
    return tensors


def _is_finite(tensor: torch.Tensor) -> bool:
    """In one pass that keeps nothing: 0.4 s for 400 million numbers on one core, where `isfinite` takes 3 to 7."""
    return not tensor.numel() or all(bool(end.isfinite()) for end in torch.aminmax(tensor))


def random_tensors(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, torch.Tensor]:
    """Seeded float32 weights of sensible sizes. A tensor depends on its name and the seed, not on the others."""
    with ThreadPoolExecutor() as threads:
        tensors = threads.map(lambda name: _random_tensor(name, shapes[name], seed), shapes)
        return dict(zip(shapes, tensors, strict=True))


def _random_tensor(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
    values = torch.randn(shape, generator=generator)
    if len(shape) > 1:
        fan_in = torch.Size(shape[1:]).numel()
        return values.mul_(1.0 if "position" in name or "pos_embed" in name or name.endswith("query") else fan_in**-0.5)
    return values.mul_(0.1).add_(1.0 if name.endswith("weight") else 0.0)


def write_snapshot(
    directory: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> None:
    """Write `config.json`, the processor files that are in `config`, shards and their index, as releases have them."""
    directory.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, torch.Tensor]] = [{}]
    used = total = 0
    for name, tensor in tensors.items():
        stored = tensor.to(dtype).contiguous()
        if shards[-1] and used + stored.nbytes > MAX_SHARD_BYTES:
            shards.append({})
            used = 0
        shards[-1][name] = stored
        used += stored.nbytes
        total += stored.nbytes
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, directory / file, metadata={"format": "pt"})
        (directory / file).chmod(0o644)  # others' workers read it too
        weight_map |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(index, indent=2))
    files = {name: config[key] for key, name in PROCESSOR_FILES.items() if key in config}
    files["config.json"] = {key: value for key, value in config.items() if key not in PROCESSOR_FILES}
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content, indent=2))
