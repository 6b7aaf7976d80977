"""Sizes at which rules turn: threads, single pixels, multiples of a token and their neighbours, squares, the largest.

The rules of transformers' image processors decide each of them alone; where they fail, ours refuse.
"""

from __future__ import annotations

import inspect
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from released import functions_of, rule_of
from transformers.image_utils import SizeDict
from transformers.models.cohere_compass.image_processing_pil_cohere_compass import smart_resize as cohere_resize
from transformers.models.glm4v.image_processing_pil_glm4v import smart_resize as glm_resize
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as qwen_resize
from transformers.models.siglip2.image_processing_pil_siglip2 import get_image_size_for_max_num_patches

from encoder.adapters.gemma3 import Gemma3
from encoder.adapters.registry import load_adapter, resolve_model
from encoder.config import EncoderConfig
from encoder.errors import BadMediaError
from encoder.media import MediaHeader

LARGEST = 89_478_485  # pixels
Decide = Callable[[int, int], Any]
"""What becomes of an image of this width and height."""


def edge_sizes(steps: Sequence[int], count: int, seed: int = 0) -> Iterator[tuple[int, int]]:
    """Around whole multiples of these numbers of pixels, mostly."""
    rng = random.Random(seed)
    multiples = [step * times + off for step in steps for times in (1, 2, 3, 4, 7, 16) for off in (-1, 0, 1)]
    edges = [*multiples, 1, 2, 3, 4095, 4096, 4097, 16_384, 32_768, 65_500]
    kinds: list[Callable[[], tuple[int, int]]] = [
        lambda: (rng.choice(edges), rng.choice(edges)),
        lambda: (rng.choice([1, 1, rng.randint(1, 6)]), rng.choice([rng.randint(1, 65_500), *edges])),
        lambda: (rng.randint(1, 40), rng.randint(1, 40)),
        lambda: (rng.choice(edges),) * 2,
        lambda: tuple(rng.randint(1, 60) * scale for scale in [rng.randint(1, 80)] * 2),  # type: ignore[return-value]
        lambda: (round(2 ** rng.uniform(0, 16)), round(2 ** rng.uniform(0, 16))),
    ]
    while count:
        size = rng.choice(kinds)()
        if math.prod(size) <= LARGEST:
            count -= 1
            yield size if rng.random() < 0.5 else size[::-1]


def assert_same(ours: Decide, theirs: Decide, steps: Sequence[int], *, count: int = 400) -> None:
    for width, height in edge_sizes(steps, count):
        try:
            wanted = theirs(width, height)
        except (ValueError, ZeroDivisionError):
            wanted = None
        try:
            decided = ours(width, height)
        except BadMediaError:
            decided = None
        assert decided == wanted, (width, height)


def adapter_of(preset: str) -> Any:
    return load_adapter(EncoderConfig(model=preset))


def grids(adapter: Any) -> Decide:
    return lambda width, height: adapter.probe(MediaHeader(width=width, height=height)).grids


class Shape:
    """As much of an image as processors need to decide: channels, height, width; what is cut from it is a box."""

    def __init__(self, width: int, height: int) -> None:
        self.shape = (3, height, width)

    def __getitem__(self, key: tuple[Any, slice, slice]) -> tuple[int, ...]:
        (_, rows, columns), (_, height, width) = key, self.shape
        return min(columns.start, width), min(rows.start, height), min(columns.stop, width), min(rows.stop, height)


@pytest.mark.parametrize(
    ("preset", "resize"),
    [
        ("random-qwen2.5-vl-7b", qwen_resize),
        ("random-qwen3-vl-8b", qwen_resize),
        ("random-cohere-compass", cohere_resize),
    ],
)
def test_qwen_and_its_likes(preset: str, resize: Callable[..., tuple[int, int]]) -> None:
    adapter = adapter_of(preset)
    sizes = adapter.sizes
    bounds = {"min_pixels": sizes.image_pixels.least, "max_pixels": sizes.image_pixels.most}

    def theirs(width: int, height: int) -> Any:
        resized = resize(height, width, factor=sizes.token_side, **bounds)
        return ((1, *(side // sizes.patch_size for side in resized)),)

    assert_same(grids(adapter), theirs, [sizes.token_side, 1000])


def test_glm4v() -> None:
    bounds = {"temporal_factor": 2, "factor": 28, "min_pixels": 112 * 112, "max_pixels": 28 * 28 * 15_000}
    theirs: Decide = lambda width, height: ((1, *(side // 14 for side in glm_resize(2, height, width, **bounds))),)  # noqa: E731
    assert_same(grids(adapter_of("random-glm4v-9b")), theirs, [28, 280])


def test_kimi() -> None:
    resize = functions_of("kimi_k25/image_processing_kimi_k25.py", {"navit_resize"})["navit_resize"]
    family = adapter_of("random-kimi-k2.5").family

    def ours(width: int, height: int) -> Any:
        (tile,) = family.cut(width, height)
        return tile.resized[0][::-1], tile.size[::-1]

    assert_same(ours, lambda width, height: resize(height, width, 14, 2, 16_384, 512), [28, 7168])


@pytest.mark.parametrize("file", ["image_processing_pil_minicpmv4_6", "video_processing_minicpmv4_6"])
def test_minicpmv46(file: str) -> None:
    names = {"ensure_divide", "find_best_resize", "get_refine_size", "get_sliced_grid"}
    rule = rule_of(f"minicpmv4_6/{file}.py", names)
    limits: dict[str, Any] = {"scale_resolution": 448, "patch_size": 14}
    if "downsample_mode" in inspect.signature(rule.find_best_resize).parameters:
        limits["downsample_mode"] = "16x"

    def theirs(width: int, height: int) -> Any:
        grid = rule.get_sliced_grid((height, width), 9, 448)
        pieces = [rule.find_best_resize((height, width), allow_upscale=grid is None, **limits)]
        if grid is not None:
            refined = rule.get_refine_size((height, width), grid, allow_upscale=True, **limits)
            pieces += [(refined[0] // grid[0], refined[1] // grid[1])] * math.prod(grid)
        return tuple((1, rows // 14, columns // 14) for rows, columns in pieces)

    assert_same(grids(adapter_of("random-minicpmv-4.6")), theirs, [56, 448])


def test_internvl() -> None:
    family = adapter_of("random-internvl3-8b").family

    def theirs(width: int, height: int) -> int:
        tiles = math.prod(get_optimal_tiled_canvas((height, width), (448, 448), 1, 12))
        return tiles + (tiles > 1)

    assert_same(lambda width, height: len(family.cut(width, height)), theirs, [448])


def test_gemma3() -> None:
    settings = {
        "pan_and_scan_min_crop_size": 256,
        "pan_and_scan_max_num_crops": 4,
        "pan_and_scan_min_ratio_to_activate": 1.2,
    }
    released = dict.fromkeys(settings) | {"do_pan_and_scan": True}  # with null for the rest, which its processor knows
    family = Gemma3({**resolve_model("random-gemma3-4b").config, "preprocessor_config": released}, "it")
    file = "gemma3/image_processing_pil_gemma3.py"
    known = {"get_image_size": lambda image, channel_dim: image.shape[1:], "itertools": itertools}
    crops = functions_of(file, {"pan_and_scan"}, **known)["pan_and_scan"]
    ours: Decide = lambda width, height: [tile.box for tile in family.cut(width, height)[1:]]  # noqa: E731
    assert_same(ours, lambda width, height: crops(None, Shape(width, height), **settings), [256, 1024])


@pytest.mark.parametrize(
    ("preset", "model", "longest", "side"),
    [("random-idefics3-8b", "idefics3", 1456, 364), ("random-smolvlm-256m", "smolvlm", 2048, 512)],
)
def test_idefics3_and_smolvlm(preset: str, model: str, longest: int, side: int) -> None:
    names = {
        "get_resize_output_image_size",
        "_resize_output_size_rescale_to_max_len",
        "_resize_output_size_scale_below_upper_bound",
        "resize_for_vision_encoder",
        "split_images",
    }
    file = f"{model}/image_processing_pil_{model}.py"
    rule = functions_of(file, names, MAX_IMAGE_SIZE=4096, SizeDict=SizeDict)
    family = adapter_of(preset).family

    class Processor:
        def resize(self, image: Shape, size: Any, resample: None) -> Shape:
            return Shape(size.width, size.height)

    def theirs(width: int, height: int) -> Any:
        first = Shape(*rule["get_resize_output_image_size"](Shape(width, height), longest)[::-1])
        second = rule["resize_for_vision_encoder"](Processor(), first, side)
        frames, *_ = rule["split_images"](Processor(), second, {"longest_edge": side})
        return len(frames), first.shape[:0:-1], second.shape[:0:-1]

    def ours(width: int, height: int) -> Any:
        tiles = family.cut(width, height)
        return len(tiles), *tiles[0].resized[:2]

    assert_same(ours, theirs, [side, longest, 4096])


@pytest.mark.parametrize(
    ("preset", "side", "longest"), [("random-pixtral-12b", 16, 1024), ("random-mistral-small-3.1", 28, 1540)]
)
def test_pixtral(preset: str, side: int, longest: int) -> None:
    names = {"get_resize_output_image_size", "_num_image_tokens"}
    known = {"get_image_size": lambda image, input_data_format: image.shape[1:]}
    rule = functions_of("pixtral/image_processing_pil_pixtral.py", names, **known)["get_resize_output_image_size"]
    family = adapter_of(preset).family

    def theirs(width: int, height: int) -> Any:
        resized = rule(Shape(width, height), longest, side)[::-1]
        if min(resized) < 1:
            raise ValueError("nothing can be resized to no pixel")
        return resized

    assert_same(lambda width, height: family.cut(width, height)[0].resized[-1], theirs, [side, longest])


def test_siglip2() -> None:
    family = adapter_of("random-siglip2-so400m-patch16-naflex").family
    ours: Decide = lambda width, height: family.cut(width, height)[0].resized[-1][::-1]  # noqa: E731
    theirs: Decide = lambda width, height: get_image_size_for_max_num_patches(height, width, 16, 256)  # noqa: E731
    assert_same(ours, theirs, [16, 256], count=200)


def test_lfm2() -> None:
    rules = {"round_by_factor", "find_closest_aspect_ratio", "_is_image_too_large", "smart_resize", "_target_ratios"}
    rule = rule_of("lfm2_vl/image_processing_lfm2_vl.py", rules | {"_get_grid_layout"})
    family = adapter_of("random-lfm2-vl-1.6b").family
    limits = {"downsample_factor": 2, "max_image_tokens": 256, "encoder_patch_size": 16}

    def theirs(width: int, height: int) -> Any:
        sizes = [rule.smart_resize(height, width, min_image_tokens=64, **limits)]
        if rule._is_image_too_large(height, width, max_pixels_tolerance=2.0, **limits):
            columns, rows, *size, _ = rule._get_grid_layout(height, width, min_tiles=2, max_tiles=10, tile_size=512)
            sizes = [tuple(size)] * (rows * columns) + sizes
        return sizes

    assert_same(lambda width, height: [tile.resized[-1] for tile in family.cut(width, height)], theirs, [32, 512])


def test_llama4() -> None:
    names = {"get_factors", "get_max_res_without_distortion", "find_supported_resolutions", "get_best_fit"}
    rule = functions_of("llama4/image_processing_llama4.py", names, SizeDict=None)
    size = SizeDict(height=336, width=336)
    resolutions = torch.tensor(rule["find_supported_resolutions"](max_num_chunks=16, patch_size=size))
    family = adapter_of("random-llama4-scout").family

    def theirs(width: int, height: int) -> Any:
        rows, columns = (side // 336 for side in rule["get_best_fit"]((height, width), resolutions).tolist())
        most = min(max(height, 336), rows * 336), min(max(width, 336), columns * 336)
        height, width = rule["get_max_res_without_distortion"]((height, width), most)
        return rows * columns + (rows * columns > 1), (max(width, 1), max(height, 1))  # as `_preprocess` goes on

    def ours(width: int, height: int) -> Any:
        tiles = family.cut(width, height)
        return len(tiles), tiles[0].resized[0]

    assert_same(ours, theirs, [336], count=300)
