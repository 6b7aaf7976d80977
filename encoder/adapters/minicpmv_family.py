"""MiniCPM-V's entry in the registry: which checkpoints, and presets that need none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from encoder.adapters.minicpmv import MiniCPMV
from encoder.adapters.minicpmv_config import read_sizes
from encoder.adapters.minicpmv_video import MiniCPMVideo
from encoder.adapters.registry import Family, Preset

if TYPE_CHECKING:
    from encoder.config import EncoderConfig


def _make(config: Mapping[str, Any], name: str, encoder: EncoderConfig) -> MiniCPMV:
    takes_video = read_sizes(config, name).version != "2.5"
    return (MiniCPMVideo if takes_video else MiniCPMV)(config, name=name, encoder=encoder)


def _released(version: str, hidden_size: int, query_num: int, vision: Mapping[str, Any]) -> dict[str, Any]:
    """A `config.json` in the released layout."""
    return {
        "architectures": ["MiniCPMV"],
        "model_type": "minicpmv",
        "version": version if version == "2.5" else float(version),
        "hidden_size": hidden_size,
        "query_num": query_num,
        "image_size": 448,
        "patch_size": 14,
        "drop_vision_last_layer": False,
        "slice_config": {"max_slice_nums": 9, "patch_size": 14, "scale_resolution": 448},
        "vision_config": {
            "model_type": {"2.5": "idefics2", "2.6": "siglip"}.get(version, "siglip_vision_model"),
            "image_size": 980,
            "patch_size": 14,
            **vision,
        },
    }


_FULL = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}
_TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
_SIZES = {"2.5": (4096, 96), "2.6": (3584, 64), "4.0": (2560, 64), "4.5": (4096, 64)}  # of a token, and tokens a slice

FAMILY = Family(
    model_types=("minicpmv",),
    presets={
        f"{size}-minicpmv-{version}": Preset(
            config=_released(version, 256 if size == "tiny" else width, queries, vision),
            summary=f"MiniCPM-V {version}, {text}, seeded random weights",
            token_rule=f"{queries} a slice, 1 to 10 slices",
        )
        for size, vision, text in (("tiny", _TINY, "2 small layers"), ("random", _FULL, "released size"))
        for version, (width, queries) in _SIZES.items()
    },
    make=_make,
    precisions=("native", "fp8"),
    settings=("max_slice_nums",),
)
