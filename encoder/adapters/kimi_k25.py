"""Kimi-K2.5's tower (MoonViT): an image at its own ratio, never enlarged, padded to whole tokens of 28x28 pixels."""

# Shapes: P patches, D tower width, T tokens.

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from encoder.adapters.grids import GridAdapter, Rows, Table
from encoder.adapters.interpolation import bicubic_taps
from encoder.adapters.processors import HALF, processor_of, read_pixels, text_width, vision_config
from encoder.adapters.qwen_vl_geometry import frame_indices
from encoder.adapters.registry import Family, Preset
from encoder.adapters.tiles import Size, Tile
from encoder.errors import ConfigError
from encoder.types import Grid

if TYPE_CHECKING:
    import torch

    from encoder.config import EncoderConfig

_DEFAULTS = {"hidden_size": 1152, "patch_size": 14, "pos_emb_height": 64, "pos_emb_width": 64}


class KimiK25:
    """Implements `GridFamily`."""

    renames = (
        (r"^vision_tower\.(layers|final_layernorm)", r"vision_tower.encoder.\1"),
        (r"\.encoder\.layers\.", ".encoder.blocks."),
        (r"(blocks\.\d+)\.norm1", r"\1.norm0"),
        (r"(blocks\.\d+)\.norm2", r"\1.norm1"),
        (r"\.mlp\.fc1", ".mlp.fc0"),
        (r"\.mlp\.fc2", ".mlp.fc1"),
        (r"\.attn\.proj", ".wo"),
        (r"\.attn\.wqkv", ".wqkv"),
        (r"\.position_embeddings$", ".weight"),
        (r"^mm_projector\.in_proj", "mm_projector.proj.0"),
        (r"^mm_projector\.out_proj", "mm_projector.proj.2"),
    )
    inner_order = ()
    pooled_patches = 0
    merge = 2
    tables: ClassVar[dict[str, Table]] = {
        "places": ((2,), "int32"),
        "taps": ((16,), "int32"),
        "tap_weights": ((16,), "float32"),
    }

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        """Raises ConfigError for tables of positions that are not square, and other merges."""
        self.vision, self.config = vision_config(config, _DEFAULTS), config
        self.side = self.vision["pos_emb_height"]
        if self.side != self.vision["pos_emb_width"] or list(self.vision.get("merge_kernel_size", [2, 2])) != [2, 2]:
            raise ConfigError(f"{name}: only square tables of positions and two by two patches a token are supported")
        self.patch_size = self.vision["patch_size"]
        self.hidden_size = text_width(config, name)
        settings = processor_of(config)
        self.pixels = read_pixels(config, HALF)
        self.most = settings.get("max_patches", 16_384)
        self.most_a_side = (settings.get("size") or {}).get("max_height", 512)

    def cut(self, width: int, height: int) -> list[Tile]:
        """The whole image, and black to the right and below up to whole tokens."""
        resized = _fit(width, height, self.patch_size, self.most, self.most_a_side)
        side = self.patch_size * self.merge
        padded = (-(-resized[0] // side) * side, -(-resized[1] // side) * side)
        return [Tile(resized=(resized,), size=padded)]

    def rows(self, grid: Grid) -> Mapping[str, np.ndarray]:
        """Row and column of each patch, and how the table of positions is read there."""
        places = frame_indices(grid[1], grid[2], self.merge, 0)
        taps, weights = bicubic_taps(grid[1], grid[2], self.merge, self.side)
        return {
            "places": np.stack([places.rows_P, places.columns_P], axis=1),
            "taps": taps,
            "tap_weights": weights,
        }

    def modules(self) -> Mapping[str, torch.nn.Module]:
        """Tower and projector, with queries, keys and values fused as they are released."""
        import torch

        from encoder.towers.stock import stock_class, stock_config

        vision = stock_config("kimi_k25", "Kimi_K25VisionConfig", self.vision)
        sizes = SimpleNamespace(
            vision_config=vision,
            text_config=SimpleNamespace(hidden_size=self.hidden_size),
            projection_hidden_size=self.config.get("projection_hidden_size", vision.hidden_size),
            projection_layer_norm_eps=self.config.get("projection_layer_norm_eps", 1e-5),
        )
        tower = stock_class("kimi_k25", "Kimi_K25VisionModel")(vision)
        for layer in tower.layers:
            for name in ("q_proj", "k_proj", "v_proj"):
                delattr(layer.attn, name)
            layer.attn.wqkv = torch.nn.Linear(vision.hidden_size, 3 * vision.hidden_size)
        return {
            "vision_tower.": tower,
            "mm_projector.": stock_class("kimi_k25", "Kimi_K25MultimodalProjection")(sizes),
        }

    def bind(self, modules: Mapping[str, Any]) -> Callable[[Rows], torch.Tensor]:
        """The tower by its parts: as a whole it averages the frames of clips, and counts patches on the host for it."""
        from torch.nn.functional import embedding_bag

        from encoder.towers.stock import PatchEmbedding

        tower, projector = modules["vision_tower."], modules["mm_projector."]
        for layer in tower.layers:
            _unfuse(layer.attn)
        embed = PatchEmbedding(tower.patch_embed.proj, self.pixels)
        table = tower.patch_embed.pos_emb.position_embeddings.flatten(0, 1).float()

        def forward(rows: Rows) -> torch.Tensor:
            weights = rows.tables["tap_weights"]
            positions_PD = embedding_bag(rows.tables["taps"], table, per_sample_weights=weights, mode="sum")
            x_PD = embed(rows.pixels_PC)
            x_PD = x_PD + positions_PD.to(x_PD.dtype)
            rotary = tower.rotary_emb(x_PD, rows.tables["places"])
            for layer in tower.layers:
                x_PD = layer(x_PD, cu_seqlens=rows.cu_seqlens, max_seqlen=len(x_PD), position_embeddings=rotary)
            squares = tower.final_layernorm(x_PD).unflatten(0, (-1, self.merge**2))
            tokens: torch.Tensor = projector(squares).squeeze(1)
            return tokens

        return forward


def _unfuse(attention: Any) -> None:
    """Queries, keys and values apart; released ones rotate neighbouring numbers, transformers' halves of a head."""
    import torch

    weight, bias = attention.wqkv.weight, attention.wqkv.bias
    for name, part_weight, part_bias in zip("qkv", weight.chunk(3), bias.chunk(3), strict=True):
        if name != "v":
            heads = (attention.num_heads, -1, 2)
            part_weight = part_weight.unflatten(0, heads).transpose(1, 2).flatten(0, 2)
            part_bias = part_bias.unflatten(0, heads).transpose(1, 2).flatten()
        linear = torch.nn.Linear(1, 1, device="meta")
        linear.weight = torch.nn.Parameter(part_weight.contiguous(), requires_grad=False)
        linear.bias = torch.nn.Parameter(part_bias.contiguous(), requires_grad=False)
        setattr(attention, f"{name}_proj", linear)
    del attention.wqkv


def _fit(width: int, height: int, patch_size: int, most: int, most_a_side: int) -> Size:
    """The image's own size, or less for its number of patches or a side. After `navit_resize` in transformers."""
    patches = max(1.0, height // patch_size) * max(1.0, width // patch_size)
    longest = most_a_side * patch_size
    scale = min(1.0, math.sqrt(most / patches), longest / height, longest / width)
    return min(max(1, int(width * scale)), longest), min(max(1, int(height * scale)), longest)


def _make(config: Mapping[str, Any], name: str, encoder: EncoderConfig) -> GridAdapter:
    return GridAdapter(KimiK25(config, name), config, name, encoder)


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
            token_rule="1 for 28x28 pixels, up to 36",
        ),
        "random-kimi-k2.5": Preset(
            config=_config({**_FULL, "pos_emb_height": 64, "pos_emb_width": 64}, {"hidden_size": 7168}),
            summary="Kimi-K2.5, released size of its tower, seeded random weights",
            token_rule="1 for 28x28 pixels, up to about 4096",
        ),
    },
    make=_make,
)
