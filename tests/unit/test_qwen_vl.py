"""The Qwen-VL line against transformers' own towers and processors, packed and alone, stills and clips."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from clips import make_clip
from PIL import Image
from qwen_reference import ReferenceQwenVL, image_processor
from released import functions_of, random_clips
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from encoder.adapters.qwen_vl import QwenVL
from encoder.adapters.qwen_vl_config import DEFAULTS, GENERATIONS, read_sizes
from encoder.adapters.qwen_vl_video import frame_size, sampled_frames
from encoder.adapters.registry import load_adapter, resolve_model
from encoder.checkpoints import init_checkpoint
from encoder.config import EncoderConfig, VideoConfig
from encoder.errors import BadMediaError, ConfigError
from encoder.items import prepare_item, probe_item
from encoder.media import MediaHeader
from encoder.pictures import draw_picture
from encoder.runner import EncoderRunner
from encoder.types import MissReason
from encoder.video import Video

PRESETS = ("tiny-qwen2-vl", "tiny-qwen2.5-vl", "tiny-qwen3-vl", "tiny-qwen3-vl-moe")
SIZES = ((300, 200), (64, 64), (500, 120), (400, 300), (30, 400), (1, 1), (700, 90))
TOLERANCE = 1e-4  # of the largest number; they are a few 1e-6 apart


def make_adapter(preset: str, **options: object) -> QwenVL:
    adapter = load_adapter(EncoderConfig.model_validate({"model": preset, **options}))
    assert isinstance(adapter, QwenVL)
    return adapter


@pytest.fixture(scope="module", params=PRESETS)
def runner(request: pytest.FixtureRequest) -> EncoderRunner:
    made = EncoderRunner.from_config(EncoderConfig(model=request.param, token_budgets=(96, 256)), "cpu")
    made.capture()
    return made


@pytest.fixture(scope="module")
def reference(runner: EncoderRunner) -> ReferenceQwenVL:
    assert isinstance(runner.adapter, QwenVL)
    return ReferenceQwenVL(runner.adapter.encoder, runner.adapter)


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() <= TOLERANCE * theirs.abs().max()


# --- tokens ---


def test_images_packed_and_alone_are_as_in_transformers(runner: EncoderRunner, reference: ReferenceQwenVL) -> None:
    pictures = [draw_picture(width, height, seed) for seed, (width, height) in enumerate(SIZES)]
    segments = [segment for picture in pictures for segment in runner.adapter.prepare(picture)]
    for picture, segment, tokens in zip(pictures, segments, runner.encode(segments), strict=True):
        wanted = reference.encode_image(picture)
        assert_close(tokens, wanted)
        assert_close(runner.encode([segment])[0], wanted)
    assert runner.stats.hit_rate == 1


def test_large_images_run_eagerly_and_right(runner: EncoderRunner, reference: ReferenceQwenVL) -> None:
    picture = draw_picture(640, 480, 3)
    (tokens,), (launch,) = runner.encode_traced(runner.adapter.prepare(picture))
    assert launch.replay.reason is MissReason.TOO_LARGE
    assert_close(tokens, reference.encode_image(picture))


def test_clips_are_as_in_transformers(runner: EncoderRunner, reference: ReferenceQwenVL) -> None:
    """Of an odd number of frames, and longer than any graph: it goes through several replays."""
    adapter, data = runner.adapter, make_clip(19, (320, 256), fps=2)
    assert isinstance(adapter, QwenVL)
    header, shape = probe_item(data, adapter, runner.config)
    segments = [segment for part in prepare_item(data, adapter, runner.config) for segment in part]
    assert tuple(segment.shape.grid for segment in segments) == shape.grids
    outputs, launches = runner.encode_traced(segments)
    assert len(launches) > 1
    assert all(launch.replay.key is not None for launch in launches)
    numbers = sampled_frames(header, adapter.sizes, VideoConfig())
    size = frame_size(header, len(numbers), adapter.sizes)
    frames = [frame.resize(size, Image.Resampling.BICUBIC) for frame in Video(data, header).frames(numbers)]
    frames += frames[-1:] * (len(frames) % 2)
    assert len(segments) == len(frames) // 2
    assert_close(torch.cat(outputs), reference.encode_frames(frames, adapter.sizes))


def test_deepstack_levels_lie_beside_the_merged_features() -> None:
    adapter = make_adapter("tiny-qwen3-vl")
    assert adapter.hidden_size == 3 * adapter.sizes.token_width
    assert adapter.sizes.deepstack_layers == (0, 2)


# --- preparation ---


@pytest.mark.parametrize("preset", PRESETS)
def test_pixels_and_their_order_are_the_processors(preset: str) -> None:
    """Without windows; with them the same patches come in another order, which the towers' comparison shows."""
    adapter = make_adapter(preset)
    sizes, picture = adapter.sizes, draw_picture(333, 210, 5)
    features = image_processor(sizes)(images=[picture], return_tensors="np")
    values = features["pixel_values"].reshape(-1, 3, 2, sizes.patch_size, sizes.patch_size)[:, :, 0]
    std, mean = (np.array(numbers)[None, :, None, None] for numbers in (sizes.pixels.std, sizes.pixels.mean))
    wanted = ((values * std + mean) * 255).round().astype(np.uint8).transpose(0, 2, 3, 1).reshape(len(values), -1)
    (segment,) = adapter.prepare(picture)
    assert segment.shape.grid == tuple(features["image_grid_thw"][0])
    if sizes.window_tokens:
        assert sorted(map(bytes, segment.patches_PC)) == sorted(map(bytes, wanted))
    else:
        assert np.array_equal(segment.patches_PC, wanted)


def test_pixels_are_resized_by_the_processors_filter_and_normalised_as_usual_where_it_says_nothing() -> None:
    model, picture = resolve_model("tiny-qwen3-vl"), draw_picture(200, 120, 6)
    said = {"image_mean": None, "image_std": None, "resample": Image.Resampling.BILINEAR.value}
    config = model.config | {"preprocessor_config": said}
    adapter = QwenVL(config, name="it", encoder=EncoderConfig(model="it"))
    assert adapter.sizes.pixels.mean == make_adapter("tiny-qwen3-vl").sizes.pixels.mean
    wanted = picture.resize(adapter._image_size(200, 120), Image.Resampling.BILINEAR)
    (segment,) = adapter.prepare(picture)
    assert np.array_equal(np.sort(segment.patches_PC, axis=None), np.sort(np.asarray(wanted), axis=None))


@pytest.mark.parametrize("preset", ["random-qwen2.5-vl-7b", "random-qwen3-vl-8b"])
def test_token_counts_of_200_random_sizes_are_the_processors(preset: str) -> None:
    adapter, rng = make_adapter(preset), random.Random(3)
    processor = image_processor(adapter.sizes)
    for _ in range(200):
        width = round(math.exp(rng.uniform(0, math.log(6000))))
        height = max(1, round(width * math.exp(rng.uniform(-5.2, 5.2))))
        shape = adapter.probe(MediaHeader(width=width, height=height))
        assert shape.num_patches == processor.get_number_of_image_patches(height, width)
        assert shape.num_tokens * 4 == shape.num_patches
        assert 0 < shape.num_tokens <= 16_384


def test_an_image_like_a_thread_is_refused_as_the_processors_do() -> None:
    with pytest.raises(BadMediaError, match="one side is over 200 times the other"):
        make_adapter("tiny-qwen2-vl").probe(MediaHeader(width=2010, height=10))


def released(model: str, function: str) -> Any:
    """A function of a video processor."""
    return functions_of(f"{model}/video_processing_{model}.py", {function})[function]


@pytest.mark.parametrize("caps", [False, True])
def test_qwen3_samples_and_sizes_200_clips_as_its_processor(caps: bool) -> None:
    config = dict(resolve_model("random-qwen3-vl-8b").config)
    sizes = read_sizes(config | {"video_preprocessor_config": {"cap_pixels_per_frame": caps}}, "it")
    pixels = sizes.video_pixels
    sample, resize = released("qwen3_vl", "sample_frames"), released("qwen3_vl", "smart_resize")
    theirs = SimpleNamespace(fps=2, min_frames=4, max_frames=768)
    for header in random_clips(200, 7):
        ours = sampled_frames(header, sizes, VideoConfig())
        metadata = SimpleNamespace(total_num_frames=header.num_frames, fps=header.frames_per_s)
        assert ours == sample(theirs, metadata).tolist()
        most = pixels.most
        if caps:
            most = max(min(768 * 32 * 32, most // len(ours)), int(pixels.least * 1.05)) * len(ours)
        height, width = resize(len(ours), header.height, header.width, 2, 32, pixels.least, most)
        assert frame_size(header, len(ours), sizes) == (width, height)


@pytest.mark.parametrize("rate", [2.0, 0.5])
def test_qwen2_samples_200_clips_as_its_processor(rate: float) -> None:
    sizes = make_adapter("random-qwen2.5-vl-7b").sizes
    sample = released("qwen2_vl", "sample_frames")
    theirs = SimpleNamespace(fps=rate, num_frames=None, min_frames=4, max_frames=768, temporal_patch_size=2)
    for header in random_clips(200, 8):
        metadata = SimpleNamespace(total_num_frames=header.num_frames, fps=header.frames_per_s)
        ours, wanted = sampled_frames(header, sizes, VideoConfig(fps=rate)), sample(theirs, metadata).tolist()
        assert len(ours) == len(wanted)
        assert max(abs(a - b) for a, b in zip(ours, wanted, strict=True)) <= 1, "float32 rounds there"
        width, height = frame_size(header, 2, sizes)
        assert 128 <= width * height // 28**2 <= 768


def test_long_clips_share_the_context() -> None:
    """Nine tenths of 128,000 tokens, whatever the length, down to the least size of a frame."""
    adapter = make_adapter("random-qwen2.5-vl-7b")
    for minutes in (1, 5, 10):
        header = MediaHeader(width=1920, height=1080, num_frames=minutes * 1800, frames_per_s=30)
        shape = adapter.probe_video(header)
        assert shape.num_tokens <= 0.9 * 128_000
    assert shape.num_tokens > 0.8 * 0.9 * 128_000
    many = make_adapter("random-qwen2.5-vl-7b", video={"max_frames": 4000})
    hour = MediaHeader(width=1920, height=1080, num_frames=60 * 1800, frames_per_s=30)
    tokens = {many.measure(grid).num_tokens for grid in many.probe_video(hour).grids}
    assert 115 < min(tokens) == max(tokens) < 141, "no less than the least of a frame"


def test_frames_between_which_a_step_is_no_whole_number_end_with_the_clip() -> None:
    """17 / (17 / 14) is a little over 14: there is a place more, at the end."""
    header = MediaHeader(width=640, height=480, num_frames=17, frames_per_s=30)
    numbers = sampled_frames(header, make_adapter("random-qwen2.5-vl-7b").sizes, VideoConfig(num_frames=14))
    assert (len(numbers), numbers[-1]) == (15, 16)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("num_frames", [1, 2, 3])
def test_the_shortest_clips_have_a_segment(preset: str, num_frames: int) -> None:
    adapter = make_adapter(preset)
    data = make_clip(num_frames, (64, 64))
    config = EncoderConfig(model=preset)
    _, shape = probe_item(data, adapter, config)
    segments = [segment for part in prepare_item(data, adapter, config) for segment in part]
    assert tuple(segment.shape.grid for segment in segments) == shape.grids
    assert len(segments) in (1, 2)


def test_a_clip_is_decoded_no_further_than_its_next_segment() -> None:
    adapter = make_adapter("tiny-qwen2.5-vl")
    data = make_clip(30, (64, 64), fps=2)
    header, _ = probe_item(data, adapter, EncoderConfig(model="tiny-qwen2.5-vl"))
    given: list[int] = []

    class CountedClip(Video):
        def frames(self, numbers: Sequence[int]) -> Iterator[Image.Image]:
            for number, frame in enumerate(super().frames(numbers)):
                given.append(number)
                yield frame

    segments = adapter.prepare_video(CountedClip(data, header))
    for count in (1, 2, 3):
        next(segments)
        assert len(given) == 2 * count


def test_rates_and_bounds_are_those_of_the_video_processors_file() -> None:
    header = MediaHeader(width=640, height=480, num_frames=300, frames_per_s=30)
    for preset in PRESETS:
        settings = {"fps": 1, "min_frames": 6, "max_frames": 12}
        for changed, wanted in (({}, 10), ({"max_frames": 8}, 8), ({"fps": 0.1}, 6)):
            config = dict(resolve_model(preset).config) | {"video_preprocessor_config": settings | changed}
            assert len(sampled_frames(header, read_sizes(config, "it"), VideoConfig())) == wanted


def test_frames_may_be_asked_for_by_number() -> None:
    header = MediaHeader(width=640, height=480, num_frames=300, frames_per_s=30)
    for preset in PRESETS:
        sizes = make_adapter(preset).sizes
        assert len(sampled_frames(header, sizes, VideoConfig(num_frames=8))) == 8
        assert len(sampled_frames(header, sizes, VideoConfig(fps=1, max_frames=6))) == 6
        assert len(sampled_frames(header, sizes, VideoConfig(fps=0.1, min_frames=12))) == 12


# --- checkpoints ---


@pytest.mark.parametrize("preset", PRESETS)
def test_checkpoints_are_read_under_either_spelling_and_with_their_processor(preset: str, tmp_path: Path) -> None:
    init_checkpoint(preset, tmp_path / "one")
    (shard,) = (tmp_path / "one").glob("*.safetensors")
    stored = load_file(shard)
    bare = all(name.startswith("visual.") for name in stored)
    assert bare or all(name.startswith("model.visual.") for name in stored)
    other = tmp_path / "other"
    other.mkdir()
    renamed = {f"model.{name}" if bare else name.removeprefix("model."): tensor for name, tensor in stored.items()}
    save_file(renamed | {"lm_head.weight": torch.zeros(2, 2)}, other / "model.safetensors")
    (other / "config.json").write_text((tmp_path / "one" / "config.json").read_text())
    (other / "preprocessor_config.json").write_text(json.dumps({"min_pixels": 50_176, "max_pixels": 100_352}))
    picture = draw_picture(200, 250, 4)
    tokens = []
    for model in (preset, str(tmp_path / "one"), str(other)):
        runner = EncoderRunner.from_config(
            EncoderConfig(model=model, graphs=False, resize_pixels=(50_176, 100_352)), "cpu"
        )
        tokens += runner.encode(runner.adapter.prepare(picture))
    assert torch.equal(tokens[0], tokens[1])
    assert torch.equal(tokens[0], tokens[2])
    pixels = make_adapter(str(other)).sizes.image_pixels
    assert (pixels.least, pixels.most) == (50_176, 100_352)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layouts": ("32x32",)}, "runs packed alone"),
        ({"resize_pixels": (100, 10)}, "at least 100 and at most 10 pixels"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_adapter("tiny-qwen2-vl", **options)


def test_configs_that_lack_something_are_refused() -> None:
    with pytest.raises(ConfigError, match="lacks 'vision_config'"):
        read_sizes({"model_type": "qwen2_vl"}, "it")
    config = resolve_model("tiny-qwen3-vl").config
    with pytest.raises(ConfigError, match="has -1 for 'depth'"):
        read_sizes(config | {"vision_config": config["vision_config"] | {"depth": -1}}, "it")


@pytest.mark.parametrize("model_type", GENERATIONS)
def test_what_configs_leave_out_is_as_in_transformers(model_type: str) -> None:
    """As its version 4 left out defaults: among them layers whose features are tokens, or that look beyond windows."""
    vision = AutoConfig.for_model(model_type).vision_config
    defaults = DEFAULTS[GENERATIONS[model_type]]
    assert {key: getattr(vision, key) for key in defaults} == {
        key: tuple(value) if isinstance(value, list) else value for key, value in defaults.items()
    }
    sizes = read_sizes({"model_type": model_type, "vision_config": {}}, "it")
    assert (sizes.full_layers, sizes.deepstack_layers) == {
        "2": (frozenset(), ()), "2.5": (frozenset({7, 15, 23, 31}), ()), "3": (frozenset(), (8, 16, 24))
    }[sizes.generation]  # fmt: skip
