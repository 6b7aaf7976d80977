"""DeepSeek-OCR 2: an image as a global view of 1024 pixels and, where it is large, up to 6 local tiles of 768.

Both views go through one tower, each with queries of its own: 144 tokens a tile, 256 and a separator for the whole.
"""

# Shapes: N tiles of a view, P patches of one after the first tower, Q queries, D width of the second tower.

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from encoder.adapters.cutting import Tile, arrangement, grid_of_tiles
from encoder.adapters.processors import HALF, processor_of, read_pixels, text_width
from encoder.adapters.registry import Family, Preset
from encoder.adapters.tile_kind import TileKind
from encoder.adapters.tiles import TileAdapter
from encoder.errors import BadMediaError, ConfigError

if TYPE_CHECKING:
    import torch

    from encoder.config import EncoderConfig

GLOBAL, LOCAL = "global", "local"
QUERIES = {768: 144, 1024: 256}  # by the pixels of a view's side: the tower has these two
SHRINK = 4  # rows of patches that become one between the towers
MOST_TILES = 16  # of a graph: the first tower's attention keeps a number for each pair of patches

_SAM = r"^model\.vision_tower\.sam_encoder\."


class DeepseekOcr2:
    """Implements `ViewFamily`."""

    renames = (
        (_SAM + r"patch_embed\.projection\.", "model.sam_model.patch_embed.proj."),
        (_SAM + r"layers\.(\d+)\.layer_norm(\d)\.", r"model.sam_model.blocks.\1.norm\2."),
        (_SAM + r"layers\.", "model.sam_model.blocks."),
        (_SAM + r"neck\.conv1\.", "model.sam_model.neck.0."),
        (_SAM + r"neck\.layer_norm1\.", "model.sam_model.neck.1."),
        (_SAM + r"neck\.conv2\.", "model.sam_model.neck.2."),
        (_SAM + r"neck\.layer_norm2\.", "model.sam_model.neck.3."),
        (_SAM + r"proj\.conv1\.", "model.sam_model.net_2."),
        (_SAM + r"proj\.conv2\.", "model.sam_model.net_3."),
        (_SAM + "pos_embed", "model.sam_model.pos_embed"),
        (r"^model\.vision_tower\.vision_encoder\.", "model.qwen2_model.model.model."),
        (r"^model\.vision_tower\.query_(\d+)_resolution\.", r"model.qwen2_model.query_\1."),
        (r"^model\.multi_modal_projector\.", "model.projector.layers."),
        (r"^model\.view_separator", "model.view_seperator"),  # as released
    )

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        """Raises ConfigError for views of sizes that the tower has no queries for."""
        settings, self.vision = processor_of(config), config.get("vision_config") or {}
        patch_size = (self.vision.get("sam_config") or {}).get("patch_size", 16)
        self.hidden_size = text_width(config, name)
        self.pixels = read_pixels(config, HALF)
        self.background = tuple(settings.get("background_color") or (127, 127, 127))
        self.splits = settings.get("crop_to_patches", True)
        self.tile_side = settings.get("tile_size", 768)
        self.least, self.most = settings.get("min_patches", 2), settings.get("max_patches", 6)
        sides = {GLOBAL: (settings.get("size") or {}).get("height", 1024) if self.splits else self.tile_side}
        if self.splits:
            sides[LOCAL] = self.tile_side
        if not set(sides.values()) <= QUERIES.keys() or len(set(sides.values())) < len(sides) or patch_size != 16:
            raise ConfigError(
                f"{name}: views of {sides} pixels in patches of {patch_size}; one has 768 pixels, the other 1024"
            )
        self.views = {
            view: TileKind(
                size=(side, side),
                grid=(1, side // patch_size, side // patch_size),
                num_tokens=QUERIES[side] + (view == GLOBAL),
                most=MOST_TILES,
            )
            for view, side in sides.items()
        }

    def cut(self, width: int, height: int) -> list[Tile]:
        """Tiles row by row, then the whole image in the middle of a grey square."""
        tiles: list[Tile] = []
        side, whole = self.tile_side, self.views[GLOBAL].size[0]
        if self.splits and max(width, height) > side:
            columns, rows = arrangement(width, height, (side, side), self.least, self.most)
            tiles = grid_of_tiles(((columns * side, rows * side),), (side, side))
        scale = whole / max(width, height)
        resized = round(width * scale), round(height * scale)
        if min(resized) < 1:
            raise BadMediaError(f"picture of {width}x{height}: nothing would be left of it in {whole} pixels; crop it")
        corner = -((whole - resized[0]) // 2), -((whole - resized[1]) // 2)
        square = Tile(resized=(resized,), corner=corner, size=(whole, whole), background=self.background)
        return [*tiles, square]

    def modules(self) -> Mapping[str, torch.nn.Module]:
        """Tower, projector and separator."""
        import torch

        from encoder.towers.stock import stock_class, stock_config

        vision = stock_config("deepseek_ocr2", "DeepseekOcr2VisionConfig", self.vision)
        separator = torch.nn.Module()
        separator.view_separator = torch.nn.Parameter(torch.empty(self.hidden_size))
        return {
            "model.vision_tower.": stock_class("deepseek_ocr2", "DeepseekOcr2VisionModel")(vision),
            "model.multi_modal_projector.": torch.nn.Linear(vision.encoder_config.hidden_size, self.hidden_size),
            "model.": separator,
        }

    def bind(self, modules: Mapping[str, Any]) -> Mapping[str, Callable[[torch.Tensor], torch.Tensor]]:
        """The tower by its parts: as a whole it makes masks and places anew for each image, on the host."""
        from encoder.towers.deepseek_ocr2 import bind_view

        tower, projector = modules["model.vision_tower."], modules["model.multi_modal_projector."]
        separator = modules["model."].view_separator
        return {
            view: bind_view(tower, projector, kind.grid[1], kind.size[0], SHRINK, separator if view == GLOBAL else None)
            for view, kind in self.views.items()
        }


def _make(config: Mapping[str, Any], name: str, encoder: EncoderConfig) -> TileAdapter:
    return TileAdapter(DeepseekOcr2(config, name), config, name, encoder)


def _config(sam: Mapping[str, Any], encoder: Mapping[str, Any], text: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["DeepseekOcr2ForConditionalGeneration"],
        "model_type": "deepseek_ocr2",
        "text_config": {"model_type": "deepseek_ocr2_text", **text},
        "vision_config": {
            "model_type": "deepseek_ocr2_vision",
            "sam_config": {"model_type": "deepseek_ocr2_sam_vision_model", **sam},
            "encoder_config": {"model_type": "deepseek_ocr2_encoder", **encoder},
        },
    }


_TINY_SAM = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "output_channels": 16,
    "global_attn_indexes": [1], "downsample_channels": [24, 64],
}  # fmt: skip
_TINY_ENCODER = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 9,
}  # fmt: skip
_TINY_TEXT = {
    "hidden_size": 48, "intermediate_size": 64, "moe_intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "vocab_size": 99,
    "mlp_layer_types": ["dense"],
}  # fmt: skip
_ENCODER = {
    "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
    "num_key_value_heads": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
}  # fmt: skip

FAMILY = Family(
    model_types=("deepseek_ocr2",),
    presets={
        "tiny-deepseek-ocr-2": Preset(
            config=_config(_TINY_SAM, _TINY_ENCODER, _TINY_TEXT),
            summary="DeepSeek-OCR 2, 2 small layers a tower, views of released size, seeded random weights",
            token_rule="257, and 144 for each of 2 to 6 tiles",
        ),
        "random-deepseek-ocr-2": Preset(
            config=_config({}, _ENCODER, {"hidden_size": 1280}),
            summary="DeepSeek-OCR 2, released size, seeded random weights",
            token_rule="257, and 144 for each of 2 to 6 tiles",
        ),
    },
    make=_make,
)
