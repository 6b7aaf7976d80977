"""A checkpoint's directory in the released layout: its files, what they say of a model, and fetching them from the hub.

Free of torch; `encoder.weights` reads the tensors that are located here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from encoder.errors import ConfigError, WeightsError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".gguf")
POINTER = b"version https://git-lfs"  # what a clone without Git LFS has in a large file's place

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


def locate_tensors(snapshot: Path, wanted: Collection[str]) -> dict[str, tuple[str, str]]:
    """The file that each of these tensors is in, and what it is called there; no tensor is read.

    Raises WeightsError where files or tensors are not all here, or the list of them can't be read.
    """
    shard_of = _shards(snapshot)
    stored_as = stored_names(wanted, shard_of)
    missing = sorted(name for name in wanted if name not in stored_as)
    if missing:
        raise WeightsError(f"{snapshot}: {len(missing)} tensors are missing: {some_of(missing)}")
    located = {name: (shard_of[stored], stored) for name, stored in stored_as.items()}
    for shard in sorted({shard for shard, _ in located.values()}):
        if not (snapshot / shard).is_file():
            raise WeightsError(f"{snapshot / shard} is missing, which {INDEX} names; fetch it again")
    return located


def _shards(snapshot: Path) -> dict[str, str]:
    """File name of the shard that holds each tensor."""
    if (snapshot / INDEX).is_file():
        return read_index(snapshot / INDEX)
    if not (snapshot / SINGLE).is_file():
        others = sorted(path.name for path in snapshot.iterdir() if path.suffix in OTHER_WEIGHTS)
        hint = f"; it has {others[0]}, which is not read: take a release in safetensors" if others else ""
        raise WeightsError(f"{snapshot} holds neither {INDEX} nor {SINGLE}{hint}")
    with opened(snapshot / SINGLE, "np") as file:
        return dict.fromkeys(file.keys(), SINGLE)


def read_index(index: Path) -> dict[str, str]:
    """File name of the shard that holds each tensor. Raises WeightsError for a file that doesn't say it."""
    try:
        return {name: str(Path(shard)) for name, shard in dict(json.loads(index.read_text())["weight_map"]).items()}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise WeightsError(f"{index} is no readable list of tensors: {error!r}; fetch it again") from error


@contextmanager
def opened(path: Path, framework: str) -> Iterator[Any]:
    """A file of tensors, which are read as those of "pt" or "np". Raises WeightsError, in the body too."""
    try:
        with safe_open(path, framework=framework) as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"{path} {_wrong_with(path, error)}; fetch it again") from error


def _wrong_with(path: Path, error: Exception) -> str:
    """What is wrong with a file of tensors."""
    try:
        with path.open("rb") as file:
            start = file.read(len(POINTER))
    except OSError as unreadable:
        return f"cannot be read: {unreadable.strerror}"
    if start == POINTER:
        return "is a pointer that Git left where it did not fetch the file (`git lfs pull` does)"
    return f"is damaged or incomplete: {error}"


def some_of(names: list[str]) -> str:
    """The first five, and how many more there are."""
    rest = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + rest


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
