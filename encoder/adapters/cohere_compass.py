"""Cohere Compass: Qwen3-VL's tower, deepstack levels included, with preparation settings of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from encoder.adapters.processors import CLIP, clip_processor_of, processor_of
from encoder.adapters.qwen_vl import QwenVL
from encoder.adapters.registry import Family, Preset

if TYPE_CHECKING:
    from encoder.config import EncoderConfig

_PROCESSOR = {
    "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280},
    "image_mean": list(CLIP.mean),
    "image_std": list(CLIP.std),
}
_CLIP_PROCESSOR = {"size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 768 * 32 * 32}}
"""What transformers' classes have where files leave it out."""


def _make(config: Mapping[str, Any], name: str, encoder: EncoderConfig) -> QwenVL:
    """With all defaults of its processors written out."""
    whole = {
        **config,
        "vision_config": config.get("vision_config") or {},
        "preprocessor_config": {**_PROCESSOR, **processor_of(config)},
        "video_preprocessor_config": {**_CLIP_PROCESSOR, **clip_processor_of(config)},
    }
    return QwenVL(whole, name=name, encoder=encoder)


def _config(vision: Mapping[str, Any], text: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["CohereCompassForConditionalGeneration"],
        "model_type": "cohere_compass",
        "text_config": {"model_type": "cohere_compass_text", **text},
        "vision_config": {"model_type": "cohere_compass_vision", **vision},
    }


_TINY = {
    "depth": 3, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": 48,
    "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1],
}  # fmt: skip
_TINY_TEXT = {
    "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": 99, "layer_types": ["full_attention"],
    "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 4, 4]}},
}  # fmt: skip

FAMILY = Family(
    model_types=("cohere_compass",),
    presets={
        "tiny-cohere-compass": Preset(
            config=_config(_TINY, _TINY_TEXT)
            | {"preprocessor_config": {"size": {"shortest_edge": 32 * 32, "longest_edge": 160 * 160}}},
            summary="Cohere Compass, 3 small layers, up to 160x160 pixels, seeded random weights",
            token_rule="1 for 32x32 pixels, up to 25; 3 levels side by side",
        ),
        "random-cohere-compass": Preset(
            config=_config({}, {"hidden_size": 3584}),
            summary="Cohere Compass, sizes as in transformers, seeded random weights",
            token_rule="1 for 32x32 pixels, up to 980, 384 a clip; 4 levels side by side",
        ),
    },
    make=_make,
    settings=("resize_pixels",),
)
