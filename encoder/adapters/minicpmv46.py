"""MiniCPM-V 4.6: slices as in its elders, a tower that shrinks four to one after its seventh layer, no resampler.

Patches of a token follow one another window by window, so that the windows the tower attends in are four rows each, and
both of its merges are reshapes.
"""

# Shapes: P patches, D tower width, W windows of four patches, T tokens of four windows, H heads, K head width.

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from encoder.adapters.grids import GridAdapter, Rows, Table
from encoder.adapters.minicpmv_slicing import plan_slices
from encoder.adapters.processors import HALF, processor_of, read_pixels, text_width, vision_config
from encoder.adapters.qwen_vl_geometry import frame_indices
from encoder.adapters.registry import Family, Preset
from encoder.adapters.tiles import Tile, grid_of_tiles
from encoder.errors import ConfigError
from encoder.types import Grid

if TYPE_CHECKING:
    import torch

    from encoder.config import EncoderConfig

_DEFAULTS = {"hidden_size": 768, "image_size": 224, "patch_size": 16}


class MiniCPMV46:
    """Implements `GridFamily`."""

    renames: tuple[tuple[str, str], ...] = ()
    pooled_patches = 0
    merge = 4
    inner_order = (0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15)  # two by two windows of two by two patches
    tables: ClassVar[dict[str, Table]] = {"position_ids": ((), "int32")}

    def __init__(self, config: Mapping[str, Any], name: str, *, max_slices: int | None) -> None:
        """Raises ConfigError for other ways of merging."""
        settings = processor_of(config)
        mode = settings.get("downsample_mode") or config.get("downsample_mode", "16x")
        if mode != "16x" or config.get("merger_times", 1) != 1 or config.get("merge_kernel_size", [2, 2]) != [2, 2]:
            raise ConfigError(f"{name}: only 16 patches a token are supported, not mode {mode!r}")
        self.vision = {**vision_config(config, _DEFAULTS), "insert_layer_id": config.get("insert_layer_id", 6)}
        self.patch_size = self.vision["patch_size"]
        self.hidden_size = text_width(config, name)
        self.pixels = read_pixels(config, HALF)
        self.resolution = settings.get("scale_resolution", 448)
        self.max_slices = max_slices or settings.get("max_slice_nums", 9)
        if not settings.get("slice_mode", True):
            self.max_slices = 1

    def cut(self, width: int, height: int) -> list[Tile]:
        """The overview, then slices row by row; all of whole tokens."""
        plan = plan_slices(
            width,
            height,
            max_slice_nums=self.max_slices,
            scale_resolution=self.resolution,
            patch_size=self.patch_size * self.merge,
        )
        overview = Tile(resized=(plan.overview,))
        return [overview, *grid_of_tiles((plan.refined,), plan.slice_size)] if plan.columns else [overview]

    def rows(self, grid: Grid) -> Mapping[str, np.ndarray]:
        """Each patch's row of the table of positions."""
        return {"position_ids": _position_ids(grid, self.vision["image_size"] // self.patch_size)}

    def modules(self) -> Mapping[str, torch.nn.Module]:
        """Tower and merger."""
        from encoder.towers.stock import stock_class, stock_config

        vision = stock_config("minicpmv4_6", "MiniCPMV4_6VisionConfig", self.vision)
        sizes = SimpleNamespace(
            vision_config=vision,
            text_config=SimpleNamespace(hidden_size=self.hidden_size),
            merge_kernel_size=(2, 2),
            merger_times=1,
        )
        return {
            "model.vision_tower.": stock_class("minicpmv4_6", "MiniCPMV4_6VisionModel")(vision),
            "model.merger.": stock_class("minicpmv4_6", "MiniCPMV4_6Merger")(sizes),
        }

    def bind(self, modules: Mapping[str, Any]) -> Callable[[Rows], torch.Tensor]:
        """The tower by its parts: as a whole it finds windows and merges image by image."""
        from encoder.towers.stock import PatchEmbedding

        tower, merger = modules["model.vision_tower."], modules["model.merger."]
        embed = PatchEmbedding(tower.embeddings.patch_embedding, self.pixels)
        shrinks = tower.config.insert_layer_id

        def forward(rows: Rows) -> torch.Tensor:
            x_PD = embed(rows.pixels_PC) + tower.embeddings.position_embedding(rows.tables["position_ids"])
            x_1PD, offsets = x_PD[None], rows.cu_seqlens
            for index, layer in enumerate(tower.encoder.layers):
                x_1PD = layer(x_1PD, None, cu_seqlens=offsets, max_seqlen=x_1PD.shape[1])
                if index == shrinks:
                    x_1PD = _merge_windows(tower.vit_merger, x_1PD[0])[None]
                    offsets = offsets // 4
            features_WD = tower.post_layernorm(x_1PD)[0]
            tokens: torch.Tensor = merger.mlp[0](features_WD.unflatten(0, (-1, 4)).flatten(1))
            return tokens

        return forward


def _merge_windows(merger: Any, x_PD: torch.Tensor) -> torch.Tensor:
    """Patches attend to the four of their window, which then become one row: `[W, D]`."""
    from torch.nn.functional import scaled_dot_product_attention

    attention = merger.self_attn
    normed_W4D = merger.layer_norm1(x_PD).unflatten(0, (-1, 4))
    q, k, v = (
        projection(normed_W4D).unflatten(2, (attention.num_heads, -1)).transpose(1, 2)
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    attended_W4D = scaled_dot_product_attention(q, k, v, scale=attention.scaling).transpose(1, 2).flatten(2)
    x_W4D = x_PD.unflatten(0, (-1, 4)) + attention.out_proj(attended_W4D)
    merged_WD: torch.Tensor = merger.linear_2(merger.act(merger.linear_1(merger.pre_norm(x_W4D.flatten(1)))))
    merged_WD = merged_WD + x_W4D.mean(1)
    return merged_WD


@lru_cache(maxsize=256)
def _position_ids(grid: Grid, side: int) -> np.ndarray:
    """The table's row nearest to each patch's place in the image; float32, as transformers divides and compares."""
    _, rows, columns = grid
    boundaries = np.arange(1 / side, 1.0, 1 / side).astype(np.float32)

    def buckets(size: int) -> np.ndarray:
        places = np.arange(size, dtype=np.float32) / np.float32(size)
        return np.searchsorted(boundaries, places, side="right").astype(np.int32)

    places = frame_indices(rows, columns, MiniCPMV46.merge, 0)
    ids = buckets(rows)[places.rows_P] * side + buckets(columns)[places.columns_P]
    return np.ascontiguousarray(ids.reshape(-1, 16)[:, MiniCPMV46.inner_order]).ravel()


def _make(config: Mapping[str, Any], name: str, encoder: EncoderConfig) -> GridAdapter:
    return GridAdapter(MiniCPMV46(config, name, max_slices=encoder.max_slice_nums), config, name, encoder)


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
            token_rule="1 for 56x56 pixels, 1 to 5 slices",
        ),
        "random-minicpmv-4.6": Preset(
            config=_config({**_SO400M, "image_size": 980}, {"hidden_size": 1024}, 6),
            summary="MiniCPM-V 4.6, released size, seeded random weights",
            token_rule="1 for 56x56 pixels, about 64 a slice, 1 to 10 slices",
        ),
    },
    make=_make,
)
