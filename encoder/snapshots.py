"""A checkpoint's directory in the released layout: its files, what they say of a model, and fetching them from the hub.

Free of torch; `encoder.weights` reads the tensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from encoder.errors import ConfigError, WeightsError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".gguf")

PROCESSOR_FILES = {
    "preprocessor_config": "preprocessor_config.json",
    "video_preprocessor_config": "video_preprocessor_config.json",
}
"""Files beside `config.json` that say how media are prepared, by the key under which a model's config has them."""

PROCESSOR_FILE = "processor_config.json"
"""Where transformers 5 writes all of them; what it has of these keys goes before the files of one."""

_IN_PROCESSOR_FILE = {"preprocessor_config": "image_processor", "video_preprocessor_config": "video_processor"}


def read_config(snapshot: Path) -> dict[str, Any]:
    """`config.json`, and what the files of processors say under the keys of `PROCESSOR_FILES`.

    Raises ConfigError for a file that is no JSON object, and where there is no `config.json`.
    """
    config = _read_json(snapshot, "config.json")
    together = _read_json(snapshot, PROCESSOR_FILE) if (snapshot / PROCESSOR_FILE).is_file() else {}
    for key, name in PROCESSOR_FILES.items():
        settings = together.get(_IN_PROCESSOR_FILE[key])
        if isinstance(settings, dict):
            config[key] = settings
        elif (snapshot / name).is_file():
            config[key] = _read_json(snapshot, name)
    return config


def _read_json(snapshot: Path, name: str) -> dict[str, Any]:
    try:
        config = json.loads((snapshot / name).read_text())
    except (OSError, ValueError, RecursionError) as error:  # RecursionError: brackets in brackets without end
        raise ConfigError(f"{snapshot}: no readable {name}: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{snapshot}/{name} is no JSON object")
    return config


def check_files(snapshot: Path, wanted: Iterable[str]) -> None:
    """Raise WeightsError where the wanted tensors' files are not all here, or their list can't be read."""
    if (snapshot / INDEX).is_file():
        shard_of = read_index(snapshot / INDEX)
        for shard in sorted({shard_of[name] for name in stored_names(wanted, shard_of).values()}):
            if not (snapshot / shard).is_file():
                raise WeightsError(f"{snapshot / shard} is missing, which {INDEX} names; fetch it again")
    elif not (snapshot / SINGLE).is_file():
        others = sorted(path.name for path in snapshot.iterdir() if path.suffix in OTHER_WEIGHTS)
        hint = f"; it has {others[0]}, which is not read: take a release in safetensors" if others else ""
        raise WeightsError(f"{snapshot} holds neither {INDEX} nor {SINGLE}{hint}")


def read_index(index: Path) -> dict[str, str]:
    """File name of the shard that holds each tensor. Raises WeightsError for a file that doesn't say it."""
    try:
        return {name: str(Path(shard)) for name, shard in dict(json.loads(index.read_text())["weight_map"]).items()}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise WeightsError(f"{index} is no readable list of tensors: {error!r}; fetch it again") from error


def stored_names(wanted: Iterable[str], stored: Iterable[str]) -> dict[str, str]:
    """What a checkpoint calls each wanted tensor, as far as it has it.

    Releases differ in whether a vision part's names begin with "model.", and in whether there is a "vision_model."
    within; each is taken.
    """
    stored = list(stored)
    spellings = {_bare(name): name for name in stored} | dict(zip(stored, stored, strict=True))
    found = {name: spellings.get(name) or spellings.get(_bare(name)) for name in wanted}
    return {name: stored_as for name, stored_as in found.items() if stored_as is not None}


def _bare(name: str) -> str:
    name = name.removeprefix("model.").replace("vision_model.", "", 1)
    return name.replace("encoder.patch_embed.", "patch_embed.")  # where transformers saves Kimi's


def download(hub_id: str, wanted_of: Callable[[dict[str, Any]], Iterable[str]]) -> Path:
    """Fetch a snapshot's settings, and of its weights the shards that hold the tensors wanted for its config.

    Raises ConfigError for what can't be fetched, and as `wanted_of` does.
    """
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import EntryNotFoundError

    settings = ["config.json", PROCESSOR_FILE, *PROCESSOR_FILES.values()]
    try:
        snapshot = Path(snapshot_download(hub_id, allow_patterns=settings))
        revision = snapshot.name  # all files of one commit, whatever is pushed meanwhile
        wanted = wanted_of(read_config(snapshot))
        try:
            shard_of = read_index(Path(hf_hub_download(hub_id, INDEX, revision=revision)))
            shards = {shard_of[name] for name in stored_names(wanted, shard_of).values()}
        except EntryNotFoundError:  # one file needs no index
            shards = {SINGLE}
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=[*settings, INDEX, *shards]))
    except ConfigError:
        raise
    except Exception as error:  # the hub client raises many kinds, of several packages
        raise ConfigError(
            f"could not fetch {hub_id!r} from the hub: {type(error).__name__}: {error}; "
            f"give a local snapshot directory instead"
        ) from error
