"""Every family on transformers' modules against transformers itself: its model, its processor, its file names.

The reference is a whole model of a tiny preset's config with random weights, saved as transformers saves it and fed by
its own image processor. Ours reads that directory. A new family is one more `Case`.
"""

from __future__ import annotations

import ast
import json
import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image
from transformers.image_utils import SizeDict

from encoder.adapters.llama4 import Llama4
from encoder.adapters.registry import load_adapter, resolve_model
from encoder.checkpoints import init_checkpoint
from encoder.config import EncoderConfig
from encoder.errors import ConfigError
from encoder.media import MediaHeader
from encoder.pictures import draw_picture
from encoder.runner import EncoderRunner
from encoder.weights import load_tensors, random_tensors

SIZES = [(200, 120), (90, 200), (31, 47), (64, 64)]
TOLERANCE = 1e-4


@dataclass(frozen=True, kw_only=True)
class Case:
    """A family: its tiny preset, and how transformers computes the same tokens."""

    preset: str
    model: str  # class name in transformers
    tokens: Callable[[Any, Any], torch.Tensor]  # from the model and its processor's batch of one image
    processor: str = ""  # class name; empty: transformers has none that runs without torchvision
    settings: dict[str, Any] = field(default_factory=dict)  # of the processor
    output: str = "patches"
    num_tokens: Callable[[Any], int] | None = None  # from the processor's batch of one image; None: always the same

    def __str__(self) -> str:
        return f"{self.preset.removeprefix('tiny-')}-{self.output}"


CASES = [
    Case(
        preset="tiny-siglip",
        model="SiglipModel",
        processor="SiglipImageProcessorPil",
        settings={"size": {"height": 70, "width": 70}},
        tokens=lambda model, batch: model.vision_model(**batch).last_hidden_state[0],
    ),
    Case(
        preset="tiny-siglip",
        output="pooled",
        model="SiglipModel",
        processor="SiglipImageProcessorPil",
        settings={"size": {"height": 70, "width": 70}},
        tokens=lambda model, batch: model.get_image_features(**batch).pooler_output,
    ),
    Case(
        preset="tiny-clip",
        model="CLIPModel",
        processor="CLIPImageProcessorPil",
        settings={"size": {"shortest_edge": 60}, "crop_size": {"height": 56, "width": 56}},
        tokens=lambda model, batch: model.vision_model(**batch).last_hidden_state[0, 1:],
    ),
    Case(
        preset="tiny-clip",
        output="pooled",
        model="CLIPModel",
        processor="CLIPImageProcessorPil",
        settings={"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}},
        tokens=lambda model, batch: model.get_image_features(**batch).pooler_output,
    ),
    Case(
        preset="tiny-dinov3",
        model="DINOv3ViTModel",
        tokens=lambda model, batch: model(**batch).last_hidden_state[0, 5:],
    ),
    Case(
        preset="tiny-dinov3",
        output="pooled",
        model="DINOv3ViTModel",
        tokens=lambda model, batch: model(**batch).pooler_output,
    ),
    Case(
        preset="tiny-internvl",
        model="InternVLForConditionalGeneration",
        processor="GotOcr2ImageProcessorPil",
        settings={"size": {"height": 56, "width": 56}, "crop_to_patches": True, "max_patches": 6},
        tokens=lambda model, batch: model.get_image_features(batch["pixel_values"]).pooler_output.flatten(0, 1),
        num_tokens=lambda batch: 4 * len(batch["pixel_values"]),
    ),
    Case(
        preset="tiny-gemma3",
        model="Gemma3ForConditionalGeneration",
        processor="Gemma3ImageProcessorPil",
        settings={
            "size": {"height": 56, "width": 56},
            "do_pan_and_scan": True,
            "pan_and_scan_min_crop_size": 64,
            "pan_and_scan_max_num_crops": 4,
            "pan_and_scan_min_ratio_to_activate": 1.2,
        },
        tokens=lambda model, batch: model.get_image_features(batch["pixel_values"]).pooler_output.flatten(0, 1),
        num_tokens=lambda batch: 4 * len(batch["pixel_values"]),
    ),
    Case(
        preset="tiny-llama4",
        model="Llama4ForConditionalGeneration",
        tokens=lambda model, batch: model.multi_modal_projector(
            model.get_image_features(**batch).last_hidden_state
        ).flatten(0, 1),
        num_tokens=lambda batch: 4 * len(batch["pixel_values"]),
    ),
    Case(
        preset="tiny-idefics3",
        model="Idefics3ForConditionalGeneration",
        processor="Idefics3ImageProcessorPil",
        tokens=lambda model, batch: torch.cat(model.get_image_features(**batch).pooler_output),
        num_tokens=lambda batch: 4 * batch["pixel_values"].shape[1],
    ),
    Case(
        preset="tiny-smolvlm",
        model="SmolVLMForConditionalGeneration",
        processor="SmolVLMImageProcessorPil",
        tokens=lambda model, batch: torch.cat(model.get_image_features(**batch).pooler_output),
        num_tokens=lambda batch: batch["pixel_values"].shape[1],
    ),
]


@dataclass(frozen=True, kw_only=True)
class Reference:
    """transformers' model and processor, and the directory that both were saved to."""

    case: Case
    snapshot: Path
    model: Any
    processor: Any

    @torch.inference_mode()
    def encode(self, picture: Image.Image) -> torch.Tensor:
        """Tokens `[T, E]` of one image."""
        return self.case.tokens(self.model, self.processor(picture))


@pytest.fixture(scope="module", params=CASES, ids=str)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    case: Case = request.param
    snapshot = tmp_path_factory.mktemp("snapshot") / str(case)
    preset = dict(resolve_model(case.preset).config)
    settings = preset.pop("preprocessor_config", {})
    config = transformers.AutoConfig.for_model(**preset)
    model = getattr(transformers, case.model)(config).eval()
    drawn = random_tensors({name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}, seed=3)
    model.load_state_dict(drawn)
    model.save_pretrained(snapshot)
    if case.processor:
        processor = getattr(transformers, case.processor)(**settings | case.settings)
        processor.save_pretrained(snapshot)
        yield Reference(
            case=case, snapshot=snapshot, model=model, processor=lambda image: processor(image, return_tensors="pt")
        )
        return
    if settings:
        (snapshot / "preprocessor_config.json").write_text(json.dumps(settings))
    yield Reference(case=case, snapshot=snapshot, model=model, processor=OursAsBatch(snapshot))


class OursAsBatch:
    """Our preparation as a model's input, where transformers has none that runs here."""

    def __init__(self, snapshot: Path) -> None:
        self.adapter: Any = load_adapter(EncoderConfig(model=str(snapshot)))

    def __call__(self, image: Image.Image) -> dict[str, torch.Tensor]:
        family = self.adapter.family
        width, height = family.tile_size
        tiles = [torch.tensor(segment.patches_PC).view(height, width, 3) for segment in self.adapter.prepare(image)]
        mean, std = torch.tensor(family.pixels.mean), torch.tensor(family.pixels.std)
        return {"pixel_values": ((torch.stack(tiles) / 255 - mean) / std).permute(0, 3, 1, 2)}


@pytest.fixture(scope="module")
def pictures() -> list[Image.Image]:
    return [draw_picture(width, height, seed) for seed, (width, height) in enumerate(SIZES)]


def test_tokens_equal_transformers(reference: Reference, pictures: list[Image.Image]) -> None:
    """Together in graphs and alone, eagerly: the same tokens as many as predicted, as transformers gives."""
    config = EncoderConfig(model=str(reference.snapshot), output=reference.case.output)
    runner = EncoderRunner.from_config(config, "cpu")
    runner.capture()
    eager = EncoderRunner.from_config(config.model_copy(update={"graphs": False}), "cpu")
    prepared = [runner.adapter.prepare(picture) for picture in pictures]
    together = iter(runner.encode([segment for segments in prepared for segment in segments]))
    for picture, segments in zip(pictures, prepared, strict=True):
        theirs = reference.encode(picture)
        shape = runner.adapter.probe(MediaHeader(width=picture.width, height=picture.height))
        assert shape.num_tokens == len(theirs)
        assert shape.num_patches == sum(segment.shape.num_patches for segment in segments)
        assert shape.grids == tuple(segment.shape.grid for segment in segments)
        for ours in (torch.cat([next(together) for _ in segments]), torch.cat(eager.encode(segments))):
            assert ours.shape == theirs.shape
            assert (ours - theirs).norm() / theirs.norm() < TOLERANCE
    assert runner.stats.hit_rate == 1


def test_sizes_matter(reference: Reference, pictures: list[Image.Image]) -> None:
    """Guards the comparison above: other pictures give other tokens."""
    one, other = (reference.encode(picture)[:1] for picture in pictures[:2])
    assert (one - other).norm() / one.norm() > 1e-2


def test_token_counts_are_the_processors(reference: Reference) -> None:
    """From the size alone, for sizes of every ratio."""
    count = reference.case.num_tokens
    adapter = load_adapter(EncoderConfig(model=str(reference.snapshot), output=reference.case.output))
    rng = random.Random(0)
    for _ in range(200):
        width, height = (round(2 ** rng.uniform(4, 9)) for _ in range(2))
        shape = adapter.probe(MediaHeader(width=width, height=height))
        if count is None:
            assert shape.num_tokens == adapter.measure(shape.grids[0]).num_tokens
        else:
            assert shape.num_tokens == count(reference.processor(Image.new("RGB", (width, height))))


def functions_of(file: str, names: set[str], **known: Any) -> dict[str, Any]:
    """Functions out of a source file of transformers that can't be imported without torchvision."""
    source = Path(transformers.__file__).parent / "models" / file
    nodes = [node for node in ast.parse(source.read_text()).body if getattr(node, "name", "") in names]
    space: dict[str, Any] = {"torch": torch, "math": math, "defaultdict": defaultdict, "lru_cache": lru_cache, **known}
    future = ast.ImportFrom(module="__future__", names=[ast.alias("annotations")], level=0)
    exec(compile(ast.fix_missing_locations(ast.Module([future, *nodes], [])), source, "exec"), space)
    return space


def test_llama4_chooses_the_canvas_that_transformers_chooses() -> None:
    """Its processor needs torchvision, but for the functions that decide."""
    names = {"get_factors", "get_max_res_without_distortion", "find_supported_resolutions", "get_best_fit"}
    theirs = functions_of("llama4/image_processing_llama4.py", names, SizeDict=None)
    size = SizeDict(height=336, width=336)
    resolutions = torch.tensor(theirs["find_supported_resolutions"](max_num_chunks=16, patch_size=size))
    family = Llama4({**resolve_model("random-llama4-scout").config}, "scout", max_tiles=None)
    rng = random.Random(1)
    for _ in range(200):
        width, height = (round(2 ** rng.uniform(4, 12)) for _ in range(2))
        rows, columns = (side // 336 for side in theirs["get_best_fit"]((height, width), resolutions).tolist())
        most = min(max(height, 336), rows * 336), min(max(width, 336), columns * 336)
        resized = theirs["get_max_res_without_distortion"]((height, width), most)
        tiles = family.cut(width, height)
        assert len(tiles) == rows * columns + (rows * columns > 1)
        assert all(tile.resized == (resized[::-1],) for tile in tiles[: rows * columns])


@pytest.mark.parametrize("preset", sorted({case.preset for case in CASES}))
def test_presets_write_what_transformers_reads(preset: str, tmp_path: Path) -> None:
    """A preset's checkpoint has the names and shapes of a released one: nothing of the vision part is missing there."""
    case = next(case for case in CASES if case.preset == preset)
    init_checkpoint(preset, tmp_path / "ours", seed=1)
    _, report = getattr(transformers, case.model).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    adapter = load_adapter(EncoderConfig(model=str(tmp_path / "ours")))
    assert load_tensors(tmp_path / "ours", adapter.weight_shapes()).keys() == adapter.weight_shapes().keys()


@pytest.mark.parametrize("preset", ["tiny-siglip", "tiny-clip", "tiny-dinov3"])
def test_options_of_other_families_are_refused(preset: str) -> None:
    with pytest.raises(ConfigError, match="tiles have one size"):
        load_adapter(EncoderConfig(model=preset, layouts=("24x24",)))
    with pytest.raises(ConfigError, match="has no output 'pooled'; it has patches"):
        load_adapter(EncoderConfig(model="tiny-minicpmv-2.6", output="pooled"))
