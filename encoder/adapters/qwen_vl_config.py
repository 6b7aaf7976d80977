"""What the released configs of Qwen2-VL, Qwen2.5-VL and Qwen3-VL say of the vision part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from encoder.adapters.processors import CLIP, HALF, processor_of, read_pixels, whole_number
from encoder.adapters.stock_families import Pixels
from encoder.errors import ConfigError

Generation = Literal["2", "2.5", "3"]

GENERATIONS: dict[str, Generation] = {
    "qwen2_vl": "2",
    "qwen2_5_vl": "2.5",
    "qwen3_vl": "3",
    "qwen3_vl_moe": "3",
    "cohere_compass": "3",  # the same tower
}
"""By the `model_type` of a checkpoint."""

_TWO = {
    "depth": 32, "num_heads": 16, "hidden_size": 3584, "patch_size": 14, "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}  # fmt: skip
DEFAULTS: dict[Generation, dict[str, Any]] = {
    "2": _TWO | {"embed_dim": 1280, "mlp_ratio": 4},
    "2.5": _TWO | {
        "intermediate_size": 3420, "out_hidden_size": 3584, "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
    "3": {
        "depth": 27, "num_heads": 16, "hidden_size": 1152, "intermediate_size": 4304, "out_hidden_size": 3584,
        "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [8, 16, 24],
    },
}  # fmt: skip
"""Of the vision part, where a checkpoint's config leaves it out: transformers' own."""

FRAMES_PER_S, MIN_FRAMES, MAX_FRAMES = 2.0, 4, 768  # of a clip, as released
_TOKEN_SIDE = {"2": 28, "2.5": 28, "3": 32}
_IMAGE_TOKENS = {"2": (4, 16_384), "2.5": (4, 16_384), "3": (64, 16_384)}  # of an image, as released
_VIDEO_TOKENS = {"2": (128, 768), "2.5": (128, 768), "3": (4, 24_576)}  # of a frame (2, 2.5), of all frames (3)
_PIXELS = {"2": CLIP, "2.5": CLIP, "3": HALF}


@dataclass(frozen=True, slots=True, kw_only=True)
class PixelRange:
    """Pixels that a picture is resized to: at least and at most."""

    least: int
    most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenSizes:
    """Sizes of the tower, and how media are prepared for it."""

    generation: Generation
    width: int  # of the tower
    mlp_width: int
    num_layers: int
    num_heads: int
    token_width: int
    patch_size: int
    merge_size: int  # patches along a token's side
    temporal_patch_size: int  # frames of a patch
    window_tokens: int  # along a window's side; 0: every layer attends to the whole frame
    full_layers: frozenset[int]  # those that do so although there are windows
    table_side: int  # of the square table of position embeddings; 0: there is none
    deepstack_layers: tuple[int, ...]  # whose residual stream gives tokens as well
    image_pixels: PixelRange
    video_pixels: PixelRange  # of one frame (2 and 2.5), or of all frames (3)
    frames_per_s: float  # that are read of a clip
    frame_bounds: tuple[int, int]  # least and most of them
    cap_frames: bool  # many frames share a budget: `cap_pixels_per_frame` of the processors
    pixels: Pixels

    @property
    def token_side(self) -> int:
        """Pixels along a token's side."""
        return self.patch_size * self.merge_size

    @property
    def patches_per_token(self) -> int:
        """Patches that become one token."""
        return self.merge_size**2

    @property
    def frame_bytes(self) -> int:
        """Numbers that one frame has in a patch."""
        return 3 * self.patch_size**2

    @property
    def output_width(self) -> int:
        """Width of an output row: the merged features, and beside them those of each deepstack level."""
        return self.token_width * (1 + len(self.deepstack_layers))


def read_sizes(config: Mapping[str, Any], name: str, resize_pixels: tuple[int, int] | None = None) -> QwenSizes:
    """Read a released config and the processor files it came with.

    Args:
        resize_pixels: least and most pixels of an image instead of the processor's.

    Raises:
        ConfigError: a size that is missing or impossible.
    """
    generation = GENERATIONS[config["model_type"]]
    if not isinstance(config.get("vision_config"), Mapping):
        raise ConfigError(f"{name}: config.json lacks 'vision_config', which Qwen-VL needs")
    vision = {**DEFAULTS[generation], **config["vision_config"]}

    def size(key: str) -> int:
        return whole_number(vision, key, f"{name}: vision_config")

    width = size("embed_dim" if generation == "2" else "hidden_size")
    patch_size, merge_size = size("patch_size"), size("spatial_merge_size")
    windows = size("window_size") // (patch_size * merge_size) if generation == "2.5" else 0
    video = config.get("video_preprocessor_config") or {}
    sizes = QwenSizes(
        generation=generation,
        width=width,
        mlp_width=int(width * vision["mlp_ratio"]) if generation == "2" else size("intermediate_size"),
        num_layers=size("depth"),
        num_heads=size("num_heads"),
        token_width=size("hidden_size" if generation == "2" else "out_hidden_size"),
        patch_size=patch_size,
        merge_size=merge_size,
        temporal_patch_size=size("temporal_patch_size"),
        window_tokens=windows,
        full_layers=frozenset(vision["fullatt_block_indexes"]) if windows else frozenset(),
        table_side=int(size("num_position_embeddings") ** 0.5) if generation == "3" else 0,
        deepstack_layers=tuple(vision["deepstack_visual_indexes"]) if generation == "3" else (),
        image_pixels=_pixel_range(processor_of(config), _IMAGE_TOKENS[generation], generation, name)
        if resize_pixels is None
        else _checked(*resize_pixels, name),
        video_pixels=_pixel_range(video, _VIDEO_TOKENS[generation], generation, name),
        frames_per_s=video.get("fps") or FRAMES_PER_S,
        frame_bounds=(video.get("min_frames") or MIN_FRAMES, video.get("max_frames") or MAX_FRAMES),
        cap_frames=_caps_frames(video, generation),
        pixels=read_pixels(config, _PIXELS[generation]),
    )
    if sizes.width % (4 * sizes.num_heads):
        raise ConfigError(f"{name}: the tower's width {sizes.width} gives {sizes.num_heads} heads no whole quarters")
    if patch_size * merge_size * (windows or 1) != (vision["window_size"] if windows else patch_size * merge_size):
        raise ConfigError(f"{name}: windows of {vision['window_size']} pixels are no whole tokens")
    return sizes


def _caps_frames(video: Mapping[str, Any], generation: Generation) -> bool:
    """Where the processor leaves it open, on as in qwen-vl-utils, unless a clip has a bound anyway (3)."""
    wanted = video.get("cap_pixels_per_frame")
    return generation != "3" if wanted is None else bool(wanted)


def _pixel_range(
    processor: Mapping[str, Any], tokens: tuple[int, int], generation: Generation, name: str
) -> PixelRange:
    """What a processor file says, in either of the spellings that releases have; else what releases say."""
    area = _TOKEN_SIDE[generation] ** 2
    size = processor.get("size") or {}
    least = processor.get("min_pixels") or size.get("shortest_edge") or size.get("min_pixels") or tokens[0] * area
    most = processor.get("max_pixels") or size.get("longest_edge") or size.get("max_pixels") or tokens[1] * area
    return _checked(int(least), int(most), name)


def _checked(least: int, most: int, name: str) -> PixelRange:
    if not 0 < least <= most:
        raise ConfigError(f"{name}: pictures cannot have at least {least} and at most {most} pixels")
    return PixelRange(least=least, most=most)
