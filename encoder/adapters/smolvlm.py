"""SmolVLM: images as for Idefics3, and clips, whose frames are one tile each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from encoder.adapters.clips import ClipTileAdapter
from encoder.adapters.cutting import Tile
from encoder.adapters.idefics3 import LONGEST, TINY, TINY_TEXT, Idefics3, fit_longest, released_config
from encoder.adapters.processors import clip_processor_of, longest_edge
from encoder.adapters.registry import Family, Preset
from encoder.errors import ConfigError

if TYPE_CHECKING:
    from encoder.config import EncoderConfig, VideoConfig
    from encoder.media import MediaHeader

FRAMES_PER_S, MAX_FRAMES = 1.0, 64
SKIP_S = 1.0  # that a long clip loses at either end


class SmolVLM(Idefics3):
    """Implements `ClipTileFamily`."""

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        """Raises ConfigError as `Idefics3` does, and for frames of another size than tiles."""
        super().__init__(config, name)
        settings, side = clip_processor_of(config), self.tile_size[0]
        if longest_edge(settings, "max_image_size", side) != side:
            raise ConfigError(f"{name}: its video processor makes {settings['max_image_size']}, its tiles are {side}")
        sampling = settings.get("video_sampling") or {}
        self.frames_per_s = sampling.get("fps") or settings.get("fps") or FRAMES_PER_S
        self.most_frames = sampling.get("max_frames") or settings.get("num_frames") or MAX_FRAMES
        self.longest_of_frame = longest_edge(settings, "size", longest_edge(sampling, "video_size", self.longest))

    def frame_numbers(self, header: MediaHeader, options: VideoConfig) -> list[int]:
        """One a second, at most 64, spread evenly; without the first and last second of long clips."""
        seconds = header.num_frames / header.frames_per_s
        rate, most = options.fps or self.frames_per_s, options.num_frames or options.max_frames or self.most_frames
        wanted = options.num_frames or max(min(round(rate * seconds), most), options.min_frames or 1)
        first, last = 0, header.num_frames - 1
        if seconds - 2 * SKIP_S > most * rate:
            skipped = SKIP_S * header.frames_per_s
            first, last = int(skipped), min(int(header.num_frames - skipped), last)
        if first >= last:
            first, last = 0, header.num_frames - 1
        wanted = min(wanted, last - first + 1)
        return sorted({int(number) for number in np.linspace(first, last, wanted, dtype=int)})

    def frame_tile(self, width: int, height: int) -> Tile:
        """Enlarged or shrunk at its ratio of sides, then made a square."""
        fitted = fit_longest(width, height, min(self.longest_of_frame, LONGEST))
        return Tile(resized=(fitted, self.tile_size))


def _make(config: Mapping[str, Any], name: str, encoder: EncoderConfig) -> ClipTileAdapter:
    return ClipTileAdapter(SmolVLM(config, name), config, name, encoder)


_BASE = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}

FAMILY = Family(
    model_types=("smolvlm",),
    presets={
        "tiny-smolvlm": Preset(
            config=released_config("smolvlm", 4, {**TINY, "image_size": 64, "patch_size": 16}, TINY_TEXT, 128),
            summary="SmolVLM, 2 small layers, tiles of 64 pixels, seeded random weights",
            token_rule="1 a tile, 3 to 5 tiles; 1 a frame",
        ),
        "random-smolvlm-256m": Preset(
            config=released_config(
                "smolvlm", 4, {**_BASE, "image_size": 512, "patch_size": 16}, {"hidden_size": 576}, 2048
            ),
            summary="SmolVLM 256M, released size, seeded random weights",
            token_rule="64 a tile, 5 to 17 tiles; 64 a frame",
        ),
    },
    make=_make,
)
