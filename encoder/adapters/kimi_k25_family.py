"""Kimi-K2.5's entry in the registry: how its adapter is made, and presets that need no checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from encoder.adapters.kimi_k25 import KimiK25
from encoder.adapters.kimi_k25_clips import KimiAdapter
from encoder.adapters.registry import Family, Preset

if TYPE_CHECKING:
    from encoder.config import EncoderConfig


def _make(config: Mapping[str, Any], name: str, encoder: EncoderConfig) -> KimiAdapter:
    return KimiAdapter(KimiK25(config, name), config, name, encoder)


def _config(vision: Mapping[str, Any], text: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["Kimi_K25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "projection_hidden_size": vision["hidden_size"],
        "text_config": {"model_type": "deepseek_v3", **text},
        "vision_config": {"model_type": "kimi_k25_vision", "patch_size": 14, **vision},
    }


_TINY_TEXT = {
    "hidden_size": 48, "intermediate_size": 64, "moe_intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
    "num_experts_per_tok": 2, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "vocab_size": 99,
}  # fmt: skip
_TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
_FULL = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}

FAMILY = Family(
    model_types=("kimi_k25",),
    presets={
        "tiny-kimi-k2.5": Preset(
            config=_config({**_TINY, "pos_emb_height": 6, "pos_emb_width": 6}, _TINY_TEXT)
            | {"preprocessor_config": {"max_patches": 100, "size": {"max_height": 12, "max_width": 12}}},
            summary="Kimi-K2.5, 2 small layers, up to 100 patches, seeded random weights",
            token_rule="1 for 28x28 pixels, up to 36; of four frames",
        ),
        "random-kimi-k2.5": Preset(
            config=_config({**_FULL, "pos_emb_height": 64, "pos_emb_width": 64}, {"hidden_size": 7168}),
            summary="Kimi-K2.5, released size of its tower, seeded random weights",
            token_rule="1 for 28x28 pixels, up to about 4096; of four frames, up to 1024",
        ),
    },
    make=_make,
)
