"""Size decisions of families whose image processors in transformers need torchvision, against what those decide."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import transformers
from released import functions_of, random_sizes, rule_of
from transformers.image_utils import SizeDict

from encoder.adapters.kimi_k25 import KimiK25
from encoder.adapters.lfm2_vl import Lfm2VL
from encoder.adapters.llama4 import Llama4
from encoder.adapters.registry import load_adapter, resolve_model
from encoder.config import EncoderConfig
from encoder.media import MediaHeader


def test_llama4_chooses_the_canvas_that_transformers_chooses() -> None:
    """Its processor needs torchvision, but for the functions that decide."""
    names = {"get_factors", "get_max_res_without_distortion", "find_supported_resolutions", "get_best_fit"}
    theirs = functions_of("llama4/image_processing_llama4.py", names, SizeDict=None)
    size = SizeDict(height=336, width=336)
    resolutions = torch.tensor(theirs["find_supported_resolutions"](max_num_chunks=16, patch_size=size))
    family = Llama4({**resolve_model("random-llama4-scout").config}, "scout", max_tiles=None)
    for width, height in random_sizes(200):
        rows, columns = (side // 336 for side in theirs["get_best_fit"]((height, width), resolutions).tolist())
        most = min(max(height, 336), rows * 336), min(max(width, 336), columns * 336)
        resized = theirs["get_max_res_without_distortion"]((height, width), most)
        tiles = family.cut(width, height)
        assert len(tiles) == rows * columns + (rows * columns > 1)
        assert all(tile.resized == (resized[::-1],) for tile in tiles[: rows * columns])


def test_lfm2_cuts_as_transformers_does() -> None:
    """Its processor needs torchvision, but for what decides: large or not, the tiles, and the size of the whole."""
    rules = {"round_by_factor", "find_closest_aspect_ratio", "_is_image_too_large", "smart_resize", "_target_ratios"}
    rule = rule_of("lfm2_vl/image_processing_lfm2_vl.py", rules | {"_get_grid_layout"})
    family = Lfm2VL({**resolve_model("random-lfm2-vl-1.6b").config}, "lfm2", max_tiles=None)
    limits = {"downsample_factor": 2, "max_image_tokens": 256, "encoder_patch_size": 16}
    large_ones = 0
    for width, height in random_sizes(200):
        tiles = family.cut(width, height)
        assert tiles[-1].resized == (rule.smart_resize(height, width, min_image_tokens=64, **limits),)
        if rule._is_image_too_large(height, width, max_pixels_tolerance=2.0, **limits):
            columns, rows, *size, _ = rule._get_grid_layout(height, width, min_tiles=2, max_tiles=10, tile_size=512)
            assert [tile.resized for tile in tiles[:-1]] == [(tuple(size),)] * (rows * columns)
            assert all(tile.size == (512, 512) for tile in tiles[:-1])
            large_ones += 1
        else:
            assert len(tiles) == 1
    assert large_ones > 40


def test_kimi_resizes_as_transformers_does() -> None:
    theirs = functions_of("kimi_k25/image_processing_kimi_k25.py", {"navit_resize"})["navit_resize"]
    family = KimiK25({**resolve_model("random-kimi-k2.5").config}, "kimi")
    limits = {"patch_size": 14, "merge_kernel_size": 2, "max_patches": 16_384, "max_size_per_side": 512}
    for width, height in random_sizes(200, most=14):
        (tile,) = family.cut(width, height)
        resized, padded = theirs(height, width, **limits)
        assert (tile.resized, tile.size) == ((resized[::-1],), padded[::-1])


def test_deepseek_ocr2_cuts_views_as_transformers_does() -> None:
    """Its processor runs without torchvision, but makes megabytes of each image: here its rules alone."""
    processor = transformers.DeepseekOcr2ImageProcessorPil()
    canvas = functions_of(
        "deepseek_ocr2/image_processing_pil_deepseek_ocr2.py",
        {"get_optimal_tiled_canvas", "get_all_supported_aspect_ratios"},
    )["get_optimal_tiled_canvas"]
    adapter: Any = load_adapter(EncoderConfig(model="random-deepseek-ocr-2"))
    split = 0
    for width, height in random_sizes(200):
        *local, whole = adapter.family.cut(width, height)
        if max(width, height) > 768:
            columns, rows = canvas((height, width), (768, 768), 2, 6)
            assert [(tile.size, tile.resized) for tile in local] == [((768, 768), ((columns * 768, rows * 768),))] * (
                columns * rows
            )
            split += 1
        else:
            assert not local
        ((new_width, new_height),) = whole.resized
        picture = np.ones((3, new_height, new_width), np.uint8)
        padded = processor.pad_to_square(picture, [127, 127, 127])
        left, top = (-start for start in whole.corner)
        assert whole.size == (1024, 1024)
        assert padded.shape == (3, 1024, 1024)
        assert (padded[:, top : top + new_height, left : left + new_width] == 1).all()
        assert (padded == 127).sum() == padded.size - picture.size
        shape = adapter.probe(MediaHeader(width=width, height=height))
        assert shape.num_tokens == 144 * len(local) + 257
    assert split > 40
