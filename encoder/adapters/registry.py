"""Model families and presets. Adding a family is one file and one line of `FAMILIES`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from encoder.adapters.base import TakesVideo
from encoder.config import EncoderConfig
from encoder.errors import ConfigError
from encoder.media import MediaHeader
from encoder.snapshots import download, locate_tensors, read_config

if TYPE_CHECKING:
    from encoder.adapters.base import EncoderAdapter

FAMILIES = {
    "minicpmv": "encoder.adapters.minicpmv_family:FAMILY",
    "qwen2-vl": "encoder.adapters.qwen_vl_family:QWEN2_VL",
    "qwen2.5-vl": "encoder.adapters.qwen_vl_family:QWEN2_5_VL",
    "qwen3-vl": "encoder.adapters.qwen_vl_family:QWEN3_VL",
    "qwen3-vl-moe": "encoder.adapters.qwen_vl_family:QWEN3_VL_MOE",
    "siglip": "encoder.adapters.siglip:FAMILY",
    "siglip2": "encoder.adapters.siglip2:FAMILY",
    "clip": "encoder.adapters.clip:FAMILY",
    "dinov3": "encoder.adapters.dinov3:FAMILY",
    "internvl": "encoder.adapters.internvl:FAMILY",
    "gemma3": "encoder.adapters.gemma3:FAMILY",
    "llama4": "encoder.adapters.llama4:FAMILY",
    "idefics3": "encoder.adapters.idefics3:FAMILY",
    "smolvlm": "encoder.adapters.smolvlm:FAMILY",
    "pixtral": "encoder.adapters.pixtral:FAMILY",
    "lfm2-vl": "encoder.adapters.lfm2_vl:FAMILY",
    "glm4v": "encoder.adapters.glm4v:FAMILY",
    "kimi-k2.5": "encoder.adapters.kimi_k25_family:FAMILY",
    "cohere-compass": "encoder.adapters.cohere_compass:FAMILY",
    "deepseek-ocr-2": "encoder.adapters.deepseek_ocr2:FAMILY",
    "minicpmv-4.6": "encoder.adapters.minicpmv46_family:FAMILY",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A model that needs no download: a released architecture, or a small one, with seeded random weights."""

    config: Mapping[str, Any]
    summary: str
    token_rule: str  # for `encpool models`


_TRIAL = MediaHeader(width=4000, height=1500, num_frames=300, frames_per_s=30.0)  # is tiled where anything is

OWN_SETTINGS = ("max_slice_nums", "resize_pixels")
"""Of `EncoderConfig`, what some families have; a model of another one refuses it instead of passing it over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One adapter file, as the registry sees it."""

    model_types: tuple[str, ...]  # of a checkpoint's config.json
    presets: Mapping[str, Preset]
    make: Callable[[Mapping[str, Any], str, EncoderConfig], EncoderAdapter]  # from config.json, name, our config
    outputs: tuple[str, ...] = ("patches",)  # what `EncoderConfig.output` may ask for
    precisions: tuple[str, ...] = ("native",)  # and `EncoderConfig.precision`
    settings: tuple[str, ...] = ()  # those of `OWN_SETTINGS` that it heeds


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model that a name stands for."""

    name: str  # as graph keys and results show it
    family: Family
    config: Mapping[str, Any]
    """Its config.json; beside its keys, those of `snapshots.PROCESSOR_FILES` hold what the files of processors say."""
    snapshot: Path | None  # where its weights are; None: seeded random

    def adapter(self, config: EncoderConfig) -> EncoderAdapter:
        """Its torch-free adapter. Raises ConfigError for what the family can't do, or a checkpoint says amiss."""
        outputs = self.family.outputs
        if config.output not in outputs:
            raise ConfigError(f"{self.name} has no output {config.output!r}; it has {', '.join(outputs)}")
        if config.precision not in self.family.precisions:
            raise ConfigError(f"{self.name} has no precision {config.precision!r}; leave it out")
        for setting in OWN_SETTINGS:
            if getattr(config, setting) is not None and setting not in self.family.settings:
                raise ConfigError(f"{self.name} has no {setting}; leave it out")
        name = self.name if config.output == "patches" else f"{self.name}:{config.output}"
        try:
            adapter = self.family.make(self.config, name, config)
            adapter.probe(_TRIAL)  # much of what a processor's file says is read only here
            if isinstance(adapter, TakesVideo):
                adapter.probe_video(_TRIAL)
            return adapter
        except Exception as error:  # others' files: arithmetic on what they say breaks in whatever way
            if self.snapshot is None or isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"{self.snapshot}: its config.json, or a processor's file beside it, says what no model of this kind "
                f"can be: {type(error).__name__}: {error}"
            ) from error


def families() -> dict[str, Family]:
    """Every family by name."""
    loaded = {}
    for name, target in FAMILIES.items():
        module, attribute = target.split(":")
        loaded[name] = getattr(importlib.import_module(module), attribute)
    return loaded


def resolve_model(name: str) -> Model:
    """What `name` stands for: a preset, a local snapshot directory, or a hub id.

    Raises:
        ConfigError: nothing goes by that name, or its architecture has no adapter.
    """
    presets = {preset: family for family in families().values() for preset in family.presets}
    if name in presets:
        return Model(name=name, family=presets[name], config=presets[name].presets[name].config, snapshot=None)
    snapshot = Path(name).expanduser()
    if not snapshot.is_dir():
        if name.count("/") != 1 or name.startswith((".", "/", "~")):
            close = get_close_matches(name, presets, n=1, cutoff=0.75)
            hint = f"did you mean {close[0]!r}?" if close else "`encpool models` lists the presets"
            raise ConfigError(f"no model {name!r}: it is no preset and no directory; {hint}")
        snapshot = download(name, lambda config: _adapter(config, name).weight_shapes())
    config = read_config(snapshot)
    return Model(
        name=name.rstrip("/").split("/")[-1],
        family=_family_of(config, name),
        config=config,
        snapshot=snapshot,
    )


def load_adapter(config: EncoderConfig) -> EncoderAdapter:
    """The torch-free adapter of a configuration."""
    return resolve_model(config.model).adapter(config)


def check_model(config: EncoderConfig) -> EncoderAdapter:
    """The torch-free adapter, after a look whether the weights are all here: in milliseconds, and unread.

    Raises:
        ConfigError: what no worker could load.
        WeightsError: a checkpoint without some of its tensors, or the files that hold them.
    """
    model = resolve_model(config.model)
    adapter = model.adapter(config)
    if model.snapshot is not None:
        locate_tensors(model.snapshot, adapter.weight_shapes())
    return adapter


def _adapter(config: Mapping[str, Any], name: str) -> EncoderAdapter:
    return _family_of(config, name).make(config, name, EncoderConfig(model=name))


def _family_of(config: Mapping[str, Any], name: str) -> Family:
    wanted = config.get("model_type")
    for family in families().values():
        if wanted in family.model_types:
            return family
    known = sorted(name for family in families().values() for name in family.model_types)
    raise ConfigError(f"{name}: model_type {wanted!r} has no adapter; these have: {', '.join(known)}")
