"""What released configs and `preprocessor_config.json` say of preparation, in the several spellings that they have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from PIL import Image

from encoder.adapters.tiles import Pixels, Size
from encoder.errors import ConfigError

IMAGENET = Pixels(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
CLIP = Pixels(mean=(0.48145466, 0.4578275, 0.40821073), std=(0.26862954, 0.26130258, 0.27577711))
HALF = Pixels()
HALF_BILINEAR = Pixels(resample=Image.Resampling.BILINEAR)


def processor_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The image processor's settings; empty where the checkpoint brings none."""
    settings: Mapping[str, Any] = config.get("preprocessor_config") or {}
    return settings


def read_pixels(config: Mapping[str, Any], default: Pixels) -> Pixels:
    """Means, deviations and filter of a checkpoint."""
    settings = processor_of(config)
    return Pixels(
        mean=tuple(settings.get("image_mean") or default.mean),
        std=tuple(settings.get("image_std") or default.std),
        resample=Image.Resampling(settings.get("resample", default.resample)),
    )


def read_size(config: Mapping[str, Any], key: str, default: int) -> Size:
    """Width and height of a setting that is a number or names height and width, or the shortest edge of a square."""
    value = processor_of(config).get(key) or default
    if isinstance(value, Mapping):
        edge = value.get("shortest_edge", 0)
        value = (value.get("width", edge), value.get("height", edge))
    width, height = as_pair(value)
    if width < 1 or height < 1:
        raise ConfigError(f"preprocessor_config.json: {key} is {processor_of(config)[key]!r}; name height and width")
    return width, height


def as_pair(value: Any) -> tuple[int, int]:
    """One number for both sides, or a pair."""
    first, second = (value, value) if isinstance(value, int) else value
    return int(first), int(second)


def vision_config(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The vision part of a config, or the whole of a tower's own, over the defaults that released files leave out."""
    return {**defaults, **config.get("vision_config", config)}


def text_width(config: Mapping[str, Any], name: str) -> int:
    """Width of the language model that the tokens are for."""
    width = (config.get("text_config") or {}).get("hidden_size")
    if not isinstance(width, int):
        raise ConfigError(f"{name}: config.json has no text_config.hidden_size, the width of its tokens")
    return width
