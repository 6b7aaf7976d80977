"""What released configs and `preprocessor_config.json` say of preparation, in the several spellings that they have."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from PIL import Image

from encoder.adapters.stock_families import Pixels
from encoder.adapters.tile_kind import Size
from encoder.errors import ConfigError

logger = logging.getLogger(__name__)

IMAGENET = Pixels(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
CLIP = Pixels(mean=(0.48145466, 0.4578275, 0.40821073), std=(0.26862954, 0.26130258, 0.27577711))
HALF = Pixels()
HALF_BILINEAR = Pixels(resample=Image.Resampling.BILINEAR)


def processor_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The image processor's settings; empty where the checkpoint brings none."""
    settings: Mapping[str, Any] = config.get("preprocessor_config") or {}
    return settings


def clip_processor_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The video processor's settings; the image processor's where a checkpoint has none for clips."""
    settings: Mapping[str, Any] = config.get("video_preprocessor_config") or processor_of(config)
    return settings


def read_pixels(config: Mapping[str, Any], default: Pixels) -> Pixels:
    """Means, deviations and filter of a checkpoint. Raises ConfigError for pixels that are not normalised by them."""
    settings = processor_of(config)
    said = {key: settings.get(key, True) for key in ("do_rescale", "do_normalize")}
    factor = settings.get("rescale_factor") or 1 / 255
    if not all(said.values()) or abs(255 * factor - 1) > 1e-4:
        raise ConfigError(
            f"preprocessor_config.json has {said | {'rescale_factor': factor}}; "
            f"only pixels that are divided by 255 and normalised are supported"
        )
    return _pixels(settings, default)


def note_clip_pixels(config: Mapping[str, Any], pixels: Pixels, name: str) -> None:
    """Warn where frames would be normalised or resized otherwise than images: here they go as images do.

    One encoder embeds both. InternVL 3.5 was released with a video file that is not that of its tower.
    """
    if _pixels(clip_processor_of(config), pixels) != pixels:
        logger.warning(
            "%s: frames are normalised and resized as images are, although its video processor has other "
            "image_mean, image_std or resample than its image processor",
            name,
        )


def _pixels(settings: Mapping[str, Any], default: Pixels) -> Pixels:
    return Pixels(
        mean=tuple(settings.get("image_mean") or default.mean),
        std=tuple(settings.get("image_std") or default.std),
        resample=Image.Resampling(settings.get("resample", default.resample)),
    )


def longest_edge(settings: Mapping[str, Any], key: str, default: int) -> int:
    """Pixels of a setting that names the longest edge. Raises ConfigError for one that names others."""
    value = settings.get(key)
    if value is None:
        return default
    if not isinstance(value, Mapping) or not isinstance(value.get("longest_edge"), int):
        raise ConfigError(f"a processor's {key} is {value!r}; name its longest_edge")
    return int(value["longest_edge"])


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


def whole_number(table: Mapping[str, Any], key: str, where: str) -> int:
    """A size that has to be there. Raises ConfigError, whose message `where` begins, for all but positive integers."""
    value = table.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        found = "lacks" if value is None else f"has {value!r} for"
        raise ConfigError(f"{where} {found} {key!r}, which is a positive integer")
    return value


def as_pair(value: Any) -> tuple[int, int]:
    """One number for both sides, or a pair."""
    first, second = (value, value) if isinstance(value, int) else value
    return int(first), int(second)


def vision_config(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The vision part of a config, or the whole of a tower's own, over the defaults that released files leave out."""
    return {**defaults, **config.get("vision_config", config)}


TEXT_WIDTHS = {
    "deepseek_ocr2_text": 4096, "deepseek_v3": 7168, "gemma3_text": 2304, "gpt_oss": 2880, "lfm2": 2560,
    "lfm2_moe": 2048, "llama": 4096, "llama4_text": 5120, "ministral3": 4096, "mistral": 4096, "qwen2": 4096,
    "qwen3": 4096, "qwen3_5_text": 4096, "qwen3_moe": 2048,
}  # fmt: skip
"""What transformers' language models have where a config leaves the width out, as its version 4 left out defaults."""


def text_width(config: Mapping[str, Any], name: str) -> int:
    """Width of the language model that the tokens are for."""
    text = config.get("text_config") or {}
    width = text.get("hidden_size", TEXT_WIDTHS.get(text.get("model_type", "")))
    if not isinstance(width, int):
        raise ConfigError(f"{name}: config.json has no text_config.hidden_size, the width of its tokens")
    return width
