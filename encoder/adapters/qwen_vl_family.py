"""The Qwen-VL line's entries in the registry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from encoder.adapters.qwen_vl import QwenVL
from encoder.adapters.qwen_vl_config import DEFAULTS
from encoder.adapters.registry import Family, Preset

if TYPE_CHECKING:
    from encoder.config import EncoderConfig

_QWEN2 = DEFAULTS["2"] | {"hidden_act": "quick_gelu"}
_QWEN2_5 = DEFAULTS["2.5"] | {"hidden_size": 1280, "hidden_act": "silu", "tokens_per_second": 2}
_QWEN3 = DEFAULTS["3"] | {"hidden_act": "gelu_pytorch_tanh"}
_SMALL = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "deepstack_visual_indexes": [5, 11, 17]}
_TINY_WINDOWS = {
    "depth": 4,
    "hidden_size": 64,
    "intermediate_size": 84,
    "num_heads": 2,
    "fullatt_block_indexes": [1, 3],
}
_TINY_3 = {"depth": 4, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "deepstack_visual_indexes": [0, 2]}

_VISION: dict[str, dict[str, dict[str, Any]]] = {
    "qwen2_vl": {
        "tiny-qwen2-vl": _QWEN2 | {"depth": 2, "embed_dim": 64, "num_heads": 2, "hidden_size": 96},
        "random-qwen2-vl-2b": _QWEN2 | {"hidden_size": 1536},
        "random-qwen2-vl-7b": _QWEN2 | {"hidden_size": 3584},
    },
    "qwen2_5_vl": {
        "tiny-qwen2.5-vl": _QWEN2_5 | _TINY_WINDOWS | {"out_hidden_size": 96},
        "random-qwen2.5-vl-3b": _QWEN2_5 | {"out_hidden_size": 2048},
        "random-qwen2.5-vl-7b": _QWEN2_5 | {"out_hidden_size": 3584},
        "random-qwen2.5-vl-72b": _QWEN2_5 | {"intermediate_size": 3456, "out_hidden_size": 8192},
    },
    "qwen3_vl": {
        "tiny-qwen3-vl": _QWEN3 | _TINY_3 | {"num_position_embeddings": 64, "out_hidden_size": 48},
        "random-qwen3-vl-4b": _QWEN3 | _SMALL | {"out_hidden_size": 2560},
        "random-qwen3-vl-8b": _QWEN3 | {"out_hidden_size": 4096},
    },
    "qwen3_vl_moe": {
        "tiny-qwen3-vl-moe": _QWEN3 | _TINY_3 | {"num_position_embeddings": 64, "out_hidden_size": 32},
        "random-qwen3-vl-30b-a3b": _QWEN3 | {"out_hidden_size": 2048},
    },
}
_RULES = {
    "qwen2_vl": "1 for 28x28 pixels; 4 to 16384 an image, 128 to 768 two frames",
    "qwen2_5_vl": "1 for 28x28 pixels; 4 to 16384 an image, 128 to 768 two frames",
    "qwen3_vl": "1 for 32x32 pixels; 64 to 16384 an image, up to 12288 a clip",
    "qwen3_vl_moe": "1 for 32x32 pixels; 64 to 16384 an image, up to 12288 a clip",
}


def _make(config: Mapping[str, Any], name: str, encoder: EncoderConfig) -> QwenVL:
    return QwenVL(config, name=name, encoder=encoder)


def _family(model_type: str) -> Family:
    return Family(
        model_types=(model_type,),
        presets={
            name: Preset(
                config={"model_type": model_type, "vision_config": {"model_type": model_type} | vision},
                summary=f"{'small layers' if name.startswith('tiny') else 'released size'}, seeded random weights",
                token_rule=_RULES[model_type],
            )
            for name, vision in _VISION[model_type].items()
        },
        make=_make,
        settings=("resize_pixels",),
    )


QWEN2_VL, QWEN2_5_VL, QWEN3_VL, QWEN3_VL_MOE = map(_family, _VISION)
