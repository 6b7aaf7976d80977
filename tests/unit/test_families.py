"""Every family on transformers' modules against transformers itself: its model, its processor, its file names.

The reference is a whole model of a tiny preset's config with random weights, saved as transformers saves it and fed by
its own image processor. Ours reads that directory. A new family is one more `Case` in `family_cases.py`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from family_cases import CASES, Case, save_reference
from PIL import Image

from encoder.adapters.clip import Clip
from encoder.adapters.grids import GridAdapter
from encoder.adapters.idefics3 import Idefics3
from encoder.adapters.pixtral import Pixtral
from encoder.adapters.processors import TEXT_WIDTHS
from encoder.adapters.registry import FAMILIES, families, load_adapter, resolve_model
from encoder.arena import ArenaLayout
from encoder.checkpoints import init_checkpoint
from encoder.config import EncoderConfig
from encoder.errors import ConfigError
from encoder.media import MediaHeader
from encoder.pictures import draw_picture
from encoder.runner import EncoderRunner
from encoder.weights import load_tensors

TOLERANCE = 1e-4


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
        tokens: torch.Tensor = self.case.tokens(self.model, self.processor(picture))
        return tokens


@pytest.fixture(scope="module", params=CASES, ids=str)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    case: Case = request.param
    snapshot = tmp_path_factory.mktemp("snapshot") / str(case)
    model, files = save_reference(case.preset, case.model, snapshot)
    settings = files.get("preprocessor_config", {})
    if case.processor:
        try:
            processor = getattr(transformers, case.processor)(**settings | case.settings)
        except ImportError:  # transformers 5.17 asks it of some that don't use it
            pytest.skip(f"{case.processor} of transformers {transformers.__version__} wants torchvision")
        processor.save_pretrained(snapshot)
        yield Reference(
            case=case, snapshot=snapshot, model=model, processor=lambda image: processor(image, return_tensors="pt")
        )
        return
    if settings:
        (snapshot / "preprocessor_config.json").write_text(json.dumps(settings))
    assert case.ours is not None
    adapter = load_adapter(EncoderConfig(model=str(snapshot)))
    yield Reference(case=case, snapshot=snapshot, model=model, processor=partial(case.ours, adapter))


@pytest.fixture(scope="module")
def pictures(reference: Reference) -> list[Image.Image]:
    return [draw_picture(width, height, seed) for seed, (width, height) in enumerate(reference.case.sizes)]


def test_tokens_equal_transformers(reference: Reference, pictures: list[Image.Image]) -> None:
    """Together in graphs and alone, eagerly: the same tokens as many as predicted, as transformers gives."""
    config = EncoderConfig(model=str(reference.snapshot), output=reference.case.output)
    if isinstance(load_adapter(config), GridAdapter):
        config = config.model_copy(update={"token_budgets": (4, 16, 64)})
    if load_adapter(config).axes[0].name == "view":
        config = config.model_copy(update={"token_budgets": (257,)})
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
    for width, height in [(round(2 ** rng.uniform(4, 9)), round(2 ** rng.uniform(4, 9))) for _ in range(200)]:
        shape = adapter.probe(MediaHeader(width=width, height=height))
        if count is None:
            assert shape.num_tokens == adapter.measure(shape.grids[0]).num_tokens
        else:
            assert shape.num_tokens == count(reference.processor(Image.new("RGB", (width, height))))


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


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_a_small_preset_and_one_of_a_released_size(family: str) -> None:
    presets = families()[family].presets
    assert {preset.split("-")[0] for preset in presets} == {"tiny", "random"}
    assert all(about.summary and about.token_rule for about in presets.values())


@pytest.mark.parametrize("preset", ["tiny-siglip", "tiny-clip", "tiny-dinov3"])
def test_options_of_other_families_are_refused(preset: str) -> None:
    with pytest.raises(ConfigError, match="tiles have one size"):
        load_adapter(EncoderConfig(model=preset, layouts=("24x24",)))
    with pytest.raises(ConfigError, match="has no output 'pooled'; it has patches"):
        load_adapter(EncoderConfig(model="tiny-minicpmv-2.6", output="pooled"))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("setting", "value"), [("max_slice_nums", 1), ("resize_pixels", (64 * 1024, 64 * 1024))])
def test_a_setting_changes_what_an_image_is_cut_into_or_is_refused(family: str, setting: str, value: object) -> None:
    about, large = families()[family], MediaHeader(width=2000, height=1500)
    preset = next(iter(about.presets))
    config = EncoderConfig.model_validate({"model": preset, setting: value})
    if setting in about.settings:
        assert load_adapter(config).probe(large) != load_adapter(EncoderConfig(model=preset)).probe(large)
    else:
        with pytest.raises(ConfigError, match=f"{preset} has no {setting}; leave it out"):
            load_adapter(config)


@pytest.mark.parametrize("preset", [name for family in families().values() for name in family.presets])
def test_no_graph_of_any_kind_holds_more_segments_than_configured(preset: str) -> None:
    adapter = load_adapter(EncoderConfig(model=preset, max_segments_per_graph=2))
    for key in adapter.axes[0].keys:
        for budget in adapter.default_budgets((key,), "cuda"):
            assert adapter.capacity((key,), budget).segments <= 2


@pytest.mark.parametrize("preset", [n for family in families().values() for n in family.presets if n[:4] == "tiny"])
def test_fill_writes_every_number_but_unused_pixels(preset: str) -> None:
    """Whatever other runs left in the buffers, of graphs of every kind."""
    adapter = load_adapter(EncoderConfig(model=preset))
    for key in adapter.axes[0].keys:
        sample = adapter.sample((key,))
        capacity = adapter.capacity((key,), 4 * sample.shape.num_tokens)
        layout, filled = ArenaLayout.of(adapter.inputs((key,), capacity)), []
        for left in (0x00, 0xFF):
            arrays = layout.arrays(torch.full((layout.num_bytes,), left, dtype=torch.uint8))
            rows = adapter.fill(arrays, [sample], (key,), capacity)
            filled.append(arrays | {"pixels": arrays["pixels"][:rows]})
        assert all(np.array_equal(filled[0][name], filled[1][name]) for name in layout.specs), (preset, key)


def test_a_clip_tower_of_its_own_projects_to_what_transformers_has_where_its_config_leaves_it_out() -> None:
    vision = resolve_model("tiny-clip").config["vision_config"]
    config = {**vision, "architectures": ["CLIPVisionModelWithProjection"]}
    assert Clip(config, "it", pooled=True).hidden_size == transformers.CLIPVisionConfig().projection_dim


def test_views_of_one_size_are_refused() -> None:
    """Nothing would tell a local tile from the whole image."""
    model = resolve_model("tiny-deepseek-ocr-2")
    with pytest.raises(ConfigError, match="one has 768 pixels, the other 1024"):
        model.family.make({**model.config, "preprocessor_config": {"tile_size": 1024}}, "it", EncoderConfig(model="it"))


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "minicpmv"])  # whose config.json says it all
@pytest.mark.parametrize("settings", [{"do_normalize": False}, {"do_rescale": False}, {"rescale_factor": 1 / 128}])
def test_pixels_that_a_processor_normalises_otherwise_are_refused(family: str, settings: dict[str, Any]) -> None:
    """Instead of being normalised all the same."""
    (preset, about), *_ = families()[family].presets.items()
    said = about.config.get("preprocessor_config", {})
    make = families()[family].make
    make(
        {**about.config, "preprocessor_config": {**said, "rescale_factor": 0.00392156862745098}},
        preset,
        EncoderConfig(model=preset),
    )
    with pytest.raises(ConfigError, match="only pixels that are divided by 255 and normalised"):
        make({**about.config, "preprocessor_config": {**said, **settings}}, preset, EncoderConfig(model=preset))


@pytest.mark.parametrize("kind", TEXT_WIDTHS)
def test_widths_that_configs_leave_out_are_transformers_defaults(kind: str) -> None:
    assert transformers.AutoConfig.for_model(kind).hidden_size == TEXT_WIDTHS[kind]
    config = dict(resolve_model("tiny-idefics3").config) | {"text_config": {"model_type": kind}}
    assert Idefics3(config, "it").hidden_size == TEXT_WIDTHS[kind]


@pytest.mark.parametrize("left_out", ["vision_feature_layer", "vision_feature_select_strategy"])
def test_a_llava_config_that_leaves_out_what_pixtral_needs_is_refused(left_out: str) -> None:
    """Its defaults are those of CLIP: the last layer but one, without the first token."""
    config = {key: value for key, value in resolve_model("tiny-pixtral").config.items() if key != left_out}
    with pytest.raises(ConfigError, match="only features of the last layer, of all patches"):
        Pixtral(config, "it")
