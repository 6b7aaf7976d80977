"""MiniCPM-V 4.6's entry in the registry: how its adapter is made, and presets that need no checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from encoder.adapters.grid_clips import ClipGridAdapter
from encoder.adapters.grids import GridAdapter
from encoder.adapters.minicpmv46 import MiniCPMV46
from encoder.adapters.registry import Family, Preset

if TYPE_CHECKING:
    from encoder.config import EncoderConfig


def _make(config: Mapping[str, Any], name: str, encoder: EncoderConfig) -> GridAdapter:
    """Without video where a checkpoint joins the frames of a second in one picture (`stack_frames`)."""
    family = MiniCPMV46(config, name, max_slices=encoder.max_slice_nums)
    stacks = (family.clip.get("stack_frames") or 1) > 1
    return (GridAdapter if stacks else ClipGridAdapter)(family, config, name, encoder)


def _config(vision: Mapping[str, Any], text: Mapping[str, Any], insert_layer: int) -> dict[str, Any]:
    return {
        "architectures": ["MiniCPMV4_6ForConditionalGeneration"],
        "model_type": "minicpmv4_6",
        "insert_layer_id": insert_layer,
        "text_config": {"model_type": "qwen3_5_text", **text},
        "vision_config": {"model_type": "minicpmv4_6_vision", "patch_size": 14, **vision},
    }


_TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
_TINY_TEXT = {
    **_TINY, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 99, "layer_types": ["full_attention"] * 2,
    "pad_token_id": 0,
}  # fmt: skip
_SO400M = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}

FAMILY = Family(
    model_types=("minicpmv4_6",),
    presets={
        "tiny-minicpmv-4.6": Preset(
            config=_config({**_TINY, "image_size": 98}, _TINY_TEXT, 0)
            | {"preprocessor_config": {"scale_resolution": 112, "max_slice_nums": 4, "downsample_mode": "16x"}},
            summary="MiniCPM-V 4.6, 2 small layers, slices of 112 pixels, seeded random weights",
            token_rule="1 for 56x56 pixels, 1 to 5 slices, of a frame too",
        ),
        "random-minicpmv-4.6": Preset(
            config=_config({**_SO400M, "image_size": 980}, {"hidden_size": 1024}, 6),
            summary="MiniCPM-V 4.6, released size, seeded random weights",
            token_rule="1 for 56x56 pixels, about 64 a slice, 1 to 10 slices, of a frame too",
        ),
    },
    make=_make,
    settings=("max_slice_nums",),
)
