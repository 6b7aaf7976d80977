"""Which frames of a clip are read, and how they are sized: as transformers' video processors do, 200 clips a family."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
from released import functions_of, random_clips, rule_of
from transformers.video_utils import VideoMetadata, default_sample_indices_fn

from encoder.adapters.base import EncoderAdapter, TakesVideo
from encoder.adapters.registry import load_adapter, resolve_model
from encoder.config import EncoderConfig, VideoConfig
from encoder.media import MediaHeader

PRESETS = {
    "glm4v": "random-glm4v-9b",
    "kimi_k25": "random-kimi-k2.5",
    "minicpmv4_6": "random-minicpmv-4.6",
    "smolvlm": "random-smolvlm-256m",
    "internvl": "random-internvl3-8b",
    "cohere_compass": "random-cohere-compass",
}
TAKERS = [*PRESETS.values(), "random-qwen2.5-vl-7b", "random-qwen3-vl-8b", "random-minicpmv-2.6", "random-minicpmv-4.5"]


def make_adapter(preset: str, **video: object) -> Any:
    adapter = load_adapter(EncoderConfig.model_validate({"model": preset, "video": video}))
    assert isinstance(adapter, TakesVideo)
    return adapter


def family_of(preset: str, **settings: object) -> Any:
    """What a family says, with these settings of its video processor."""
    config = resolve_model(preset).config
    model = resolve_model(preset)
    changed = type(model)(
        name=model.name,
        family=model.family,
        config=config | {"video_preprocessor_config": settings} if settings else config,
        snapshot=None,
    )
    adapter: Any = changed.adapter(EncoderConfig(model=preset))
    return adapter.family


def metadata_of(header: MediaHeader) -> VideoMetadata:
    return VideoMetadata(
        total_num_frames=header.num_frames,
        fps=header.frames_per_s,
        duration=header.num_frames / header.frames_per_s,
        width=header.width,
        height=header.height,
    )


def sampler(model: str, **attributes: object) -> Callable[..., Any]:
    sample = functions_of(f"{model}/video_processing_{model}.py", {"sample_frames"})["sample_frames"]
    return lambda metadata, **options: sample(SimpleNamespace(**attributes), metadata, **options)


# --- frames ---


@pytest.mark.parametrize("rate", [None, 0.5, 4.0])
def test_glm4v_reads_the_frames_that_its_processor_reads(rate: float | None) -> None:
    theirs, family = sampler("glm4v", fps=2, max_duration=300), family_of("random-glm4v-9b")
    for header in random_clips(200, 3):
        ours = family.frame_numbers(header, VideoConfig(fps=rate))
        assert ours == theirs(metadata_of(header), fps=rate).tolist()
        assert len(ours) % 2 == 0


def test_glm46v_reads_the_frames_that_its_processor_reads() -> None:
    theirs = sampler("glm46v", temporal_patch_size=2)
    family = family_of("random-glm4v-9b", video_processor_type="Glm46VVideoProcessor")
    lengths = set()
    for header in [*random_clips(200, 4), *short_clips()]:
        ours, wanted = family.frame_numbers(header, VideoConfig()), theirs(metadata_of(header)).tolist()
        assert ours == (wanted or [0, 0]), "theirs reads nothing of a clip of a frame or two"
        lengths.add(len(ours))
    assert max(lengths) == 640


def short_clips() -> Iterator[MediaHeader]:
    for num_frames in (1, 2, 3, 5, 29, 30, 31):
        yield MediaHeader(width=64, height=48, num_frames=num_frames, frames_per_s=30.0)


def test_smolvlm_reads_the_frames_that_its_processor_reads() -> None:
    theirs, family = sampler("smolvlm", num_frames=64, fps=1), family_of("random-smolvlm-256m")
    for header in [*random_clips(200, 5), *short_clips()]:
        for options, asked in (
            (VideoConfig(), {}),
            (VideoConfig(fps=3, max_frames=20), {"fps": 3, "num_frames": 20}),
        ):
            assert family.frame_numbers(header, options) == theirs(metadata_of(header), **asked).tolist()


def test_smolvlm_samples_as_either_file_says() -> None:
    header = MediaHeader(width=640, height=480, num_frames=3000, frames_per_s=30.0)
    older = family_of(
        "random-smolvlm-256m", video_sampling={"fps": 2, "max_frames": 7, "video_size": {"longest_edge": 512}}
    )
    newer = family_of("random-smolvlm-256m", fps=2, num_frames=7, size={"longest_edge": 512})
    for family in (older, newer):
        assert len(family.frame_numbers(header, VideoConfig())) == 7
        assert family.frame_tile(640, 480).resized == ((512, 384), (512, 512))


def test_minicpmv46_reads_the_frames_that_its_processor_reads() -> None:
    theirs, family = sampler("minicpmv4_6", max_num_frames=128, stack_frames=1), family_of("random-minicpmv-4.6")
    for header in [*random_clips(200, 6), *short_clips()]:
        assert family.frame_numbers(header, VideoConfig()) == theirs(metadata_of(header))
        fewer = family.frame_numbers(header, VideoConfig(max_frames=10))
        assert fewer == theirs(metadata_of(header), max_num_frames=10)


def test_minicpmv46_takes_no_video_where_it_would_stack_frames() -> None:
    model = resolve_model("tiny-minicpmv-4.6")
    stacked = model.config | {"video_preprocessor_config": {"stack_frames": 5}}
    adapter = model.family.make(stacked, "it", EncoderConfig(model="tiny-minicpmv-4.6"))
    assert not isinstance(adapter, TakesVideo)


@pytest.mark.skipif(
    default_sample_indices_fn(VideoMetadata(total_num_frames=7, fps=30.0), num_frames=4)[-1] != 5,
    reason=f"transformers {transformers.__version__} spaces frames by whole numbers, away from the clip's end",
)
def test_kimi_reads_the_frames_that_its_processor_reads() -> None:
    family = family_of("random-kimi-k2.5")
    for header in [*random_clips(200, 7), *short_clips()]:
        wanted = default_sample_indices_fn(metadata_of(header), fps=2)
        assert family.frame_numbers(header, VideoConfig()) == wanted.tolist()


def test_cohere_compass_reads_the_frames_that_its_processor_reads() -> None:
    theirs = sampler("cohere_compass", fps=2, min_frames=4, max_frames=768)
    adapter = make_adapter("random-cohere-compass")
    for header in random_clips(200, 8):
        assert len(adapter.probe_video(header).grids) == -(-len(theirs(metadata_of(header))) // 2)


def test_internvl_reads_the_frames_that_its_processor_reads() -> None:
    theirs = sampler("internvl", num_frames=None, initial_shift=True)
    family = family_of("random-internvl3-8b")
    rng = random.Random(0)
    for _ in range(100):
        total, fps = rng.randint(30, 2000), rng.choice([0.5, 1.0, 2.0])
        header = MediaHeader(width=64, height=48, num_frames=total, frames_per_s=30.0)
        for options, count, rate in (
            (VideoConfig(), 8, None),
            (VideoConfig(num_frames=5), 5, None),
            (VideoConfig(fps=fps), None, fps),
        ):
            if rate is not None and total / 30 * fps < 1:
                continue
            wanted = theirs(metadata_of(header), num_frames=count, fps=rate).tolist()
            assert family.frame_numbers(header, options) == wanted


@pytest.mark.parametrize("preset", TAKERS)
def test_frames_may_be_asked_for_by_number_rate_and_bounds(preset: str) -> None:
    """Never falling, never beyond the clip, and at least one, however short the clip is."""
    header = MediaHeader(width=640, height=480, num_frames=3000, frames_per_s=30.0)

    def segments(header: MediaHeader = header, **video: object) -> int:
        return len(make_adapter(preset, **video).probe_video(header).grids)

    a_frame = segments(num_frames=8) / 8  # a segment may hold several frames, a frame give several segments
    assert segments(num_frames=16) == 16 * a_frame
    assert segments(fps=2, max_frames=24) == pytest.approx(24 * a_frame, abs=a_frame)
    assert segments(fps=0.05, min_frames=24) == pytest.approx(24 * a_frame, abs=a_frame)
    for short in short_clips():
        for video in ({}, {"num_frames": 5}, {"fps": 0.1}, {"fps": 60}, {"min_frames": 9}, {"max_frames": 1}):
            assert segments(short, **video) >= 1


@pytest.mark.timeout(30)
@pytest.mark.parametrize("preset", TAKERS)
def test_any_number_of_frames_may_be_asked_for(preset: str) -> None:
    """As many as there are come, and no list is made of what was asked for."""
    header = MediaHeader(width=64, height=48, num_frames=60, frames_per_s=30.0)
    for video in ({"num_frames": 10**12}, {"min_frames": 10**12}, {"fps": 240.0, "max_frames": 10**12}):
        assert make_adapter(preset, **video).probe_video(header).grids


# --- sizes ---


def tokens_of(adapter: EncoderAdapter, header: MediaHeader) -> list[int]:
    assert isinstance(adapter, TakesVideo)
    return [adapter.measure(grid).num_tokens for grid in adapter.probe_video(header).grids]


def test_glm4v_sizes_frames_as_its_processor() -> None:
    resize = functions_of("glm4v/video_processing_glm4v.py", {"smart_resize"})["smart_resize"]
    adapter = make_adapter("random-glm4v-9b")
    bounds = {"min_pixels": 112 * 112, "max_pixels": 28 * 28 * 2 * 30_000}
    for header in random_clips(200, 9):
        num_frames = len(adapter.family.frame_numbers(header, VideoConfig()))
        height, width = resize(num_frames, header.height, header.width, **bounds)
        (tile,) = adapter.family.cut_frame(header.width, header.height, num_frames)
        assert tile.resized == ((width, height),)
        assert tokens_of(adapter, header) == [height * width // 28**2] * (num_frames // 2)


def test_cohere_compass_sizes_frames_as_its_processor() -> None:
    resize = functions_of("cohere_compass/video_processing_cohere_compass.py", {"smart_resize"})["smart_resize"]
    adapter = make_adapter("random-cohere-compass")
    bounds = {"factor": 32, "min_pixels": 128 * 32 * 32, "max_pixels": 32 * 32 * 768}
    sample = sampler("cohere_compass", fps=2, min_frames=4, max_frames=768)
    for header in random_clips(200, 10):
        num_frames = len(sample(metadata_of(header)))
        height, width = resize(num_frames, header.height, header.width, **bounds)
        assert tokens_of(adapter, header) == [height * width // 32**2] * math.ceil(num_frames / 2)


def test_kimi_sizes_frames_as_its_processor() -> None:
    resize = functions_of("kimi_k25/video_processing_kimi_k25.py", {"navit_resize"})["navit_resize"]
    adapter = make_adapter("random-kimi-k2.5")
    for header in random_clips(200, 11):
        num_frames = len(adapter.family.frame_numbers(header, VideoConfig()))
        resized, (height, width) = resize(header.height, header.width, 14, 2, 4096, 512)
        (tile,) = adapter.family.cut_frame(header.width, header.height, num_frames)
        assert (tile.resized, tile.size) == ((resized[::-1],), (width, height))
        assert tokens_of(adapter, header) == [height * width // 28**2] * math.ceil(num_frames / 4)
        assert [grid[0] for grid in adapter.probe_video(header).grids[:-1]] == [4] * (math.ceil(num_frames / 4) - 1)


def test_smolvlm_sizes_frames_as_its_processor() -> None:
    name = "get_resize_output_image_size"
    resize = functions_of("smolvlm/video_processing_smolvlm.py", {name}, MAX_IMAGE_SIZE=4096)[name]
    adapter = make_adapter("random-smolvlm-256m")
    for header in random_clips(200, 12):
        video = SimpleNamespace(size=lambda header=header: (1, 3, header.height, header.width))
        height, width = resize(video, 2048)
        assert adapter.family.frame_tile(header.width, header.height).resized == ((width, height), (512, 512))
        assert set(tokens_of(adapter, header)) == {64}


def test_minicpmv46_slices_frames_as_its_processor() -> None:
    names = {"ensure_divide", "find_best_resize", "get_refine_size", "get_sliced_grid"}
    rule = rule_of("minicpmv4_6/video_processing_minicpmv4_6.py", names)
    adapter, limits = make_adapter("random-minicpmv-4.6"), {"scale_resolution": 448, "patch_size": 14}
    for header in random_clips(200, 13):
        size = header.height, header.width
        grid = rule.get_sliced_grid(size, 9, 448)
        pieces = [rule.find_best_resize(size, allow_upscale=grid is None, **limits)]
        if grid is not None:
            height, width = rule.get_refine_size(size, grid, allow_upscale=True, **limits)
            pieces += [(height // grid[0], width // grid[1])] * (grid[0] * grid[1])
        num_frames = len(adapter.family.frame_numbers(header, VideoConfig()))
        wanted = [height * width // 56**2 for height, width in pieces] * num_frames
        assert tokens_of(adapter, header) == wanted
