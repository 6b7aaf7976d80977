"""Clips through MiniCPM-V: frame by frame (2.6, 4.0), or in groups with times (4.5) as released."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from clips import make_clip
from PIL import Image
from reference import EPS, ReferenceMiniCPMV, sincos_2d

from encoder.adapters.base import TakesVideo
from encoder.adapters.minicpmv_frames import choose_frames, choose_groups
from encoder.adapters.minicpmv_slicing import plan_slices
from encoder.adapters.minicpmv_video import MiniCPMVideo
from encoder.adapters.registry import load_adapter
from encoder.checkpoints import init_checkpoint
from encoder.config import EncoderConfig, VideoConfig
from encoder.items import prepare_item, probe_item
from encoder.pictures import draw_picture
from encoder.runner import EncoderRunner
from encoder.video import Video


class TimedReference(ReferenceMiniCPMV):
    """The 4.5 resampler: keys of a group's frames end to end, each with its frame's time."""

    @torch.inference_mode()
    def encode_group(self, pictures: Sequence[Image.Image], times: Sequence[int]) -> torch.Tensor:
        """Tokens `[Q, E]` of one group of resized frames; a time of -1 is none."""
        norm = {
            name: (self.weights[f"resampler.{name}.weight"], self.weights[f"resampler.{name}.bias"])
            for name in ("ln_q", "ln_kv", "ln_post")
        }
        width = self.weights["resampler.query"].shape[1]
        keys, values = [], []
        for picture, time in zip(pictures, times, strict=True):
            pixels = (torch.from_numpy(np.array(picture)).permute(2, 0, 1).float() / 255 - 0.5) / 0.5
            features = self.tower(pixels[None]).last_hidden_state[0]
            y = F.linear(features, self.weights["resampler.kv_proj.weight"])
            y = F.layer_norm(y, (width,), *norm["ln_kv"], EPS)
            places = torch.from_numpy(sincos_2d(width, pixels.shape[1] // 14, pixels.shape[2] // 14))
            keys.append(y + places + (torch.from_numpy(time_code(width, time)) if time >= 0 else 0))
            values.append(y)
        queries = F.layer_norm(self.weights["resampler.query"], (width,), *norm["ln_q"], EPS)
        out, _ = self.attention(queries[None], torch.cat(keys)[None], torch.cat(values)[None], need_weights=False)
        return F.layer_norm(out[0], (width,), *norm["ln_post"], EPS) @ self.weights["resampler.proj"]


def time_code(width: int, time: int) -> np.ndarray:
    """Sines, then cosines, over the whole width."""
    omega = 1.0 / 10000 ** (np.arange(width // 2, dtype=np.float32) / (width / 2.0))
    return np.concatenate([np.sin(time * omega), np.cos(time * omega)]).astype(np.float32)


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("timed") / "tiny-minicpmv-4.5"
    init_checkpoint("tiny-minicpmv-4.5", directory)
    return directory


def runner_of(model: str, **options: object) -> EncoderRunner:
    config = EncoderConfig.model_validate({"model": model, **options})
    runner = EncoderRunner.from_config(config, "cpu")
    runner.capture()
    return runner


def clip_and_frames(runner: EncoderRunner, data: bytes) -> tuple[list[Image.Image], list[tuple[int, ...]]]:
    """The resized frames that are read, and the times of each group."""
    header, _ = probe_item(data, runner.adapter, runner.config)
    groups = choose_groups(header.num_frames, header.frames_per_s, runner.config.video)
    size = plan_slices(header.width, header.height, max_slice_nums=1).overview
    frames = [frame.resize(size, Image.Resampling.BICUBIC) for frame in Video(data, header).frames(groups.numbers)]
    return frames, groups.times


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_groups_of_frames_equal_the_released_arithmetic(snapshot: Path, graphs: bool) -> None:
    """Seven frames in groups of three, the last of one; a still beside them has no time."""
    runner = runner_of(
        str(snapshot),
        graphs=graphs,
        token_budgets={"packed": (128,), "grouped": (128,)},
        video={"num_frames": 7, "max_frames": 3, "max_group_frames": 3},
    )
    reference, data = TimedReference(snapshot), make_clip(14, (300, 200), fps=2)
    frames, times = clip_and_frames(runner, data)
    assert [len(group) for group in times] == [3, 3, 1]
    segments = [segment for part in prepare_item(data, runner.adapter, runner.config) for segment in part]
    still = draw_picture(300, 200, 1)
    outputs, launches = runner.encode_traced([*segments, *runner.adapter.prepare(still)])
    start = 0
    for group, tokens in zip(times, outputs, strict=False):
        wanted = reference.encode_group(frames[start : start + len(group)], group)
        assert (tokens - wanted).norm() / wanted.norm() < 1e-4
        start += len(group)
    picture = still.resize(plan_slices(300, 200).overview, Image.Resampling.BICUBIC)
    wanted = reference.encode_group([picture], [-1])
    assert (outputs[-1] - wanted).norm() / wanted.norm() < 1e-4
    if graphs:
        layouts = {str(launch.replay.key.axis_keys[0]) for launch in launches if launch.replay.key is not None}
        assert layouts == {"packed", "grouped"}
        assert runner.stats.hit_rate == 1


def test_times_matter(snapshot: Path) -> None:
    """Guards the comparison: the same frames at other times give other tokens."""
    reference = TimedReference(snapshot)
    pictures = [draw_picture(448, 448, seed) for seed in (2, 3)]
    early, late = (reference.encode_group(pictures, times) for times in ((0, 1), (40, 90)))
    assert (early - late).norm() / early.norm() > 1e-2


@pytest.mark.parametrize("version", ["2.6", "4.0", "4.5"])
def test_a_clip_is_cut_as_its_header_promised(version: str) -> None:
    config = EncoderConfig(model=f"tiny-minicpmv-{version}")
    adapter = load_adapter(config)
    data = make_clip(95, (160, 120), fps=25)
    _, shape = probe_item(data, adapter, config)
    segments = [segment for part in prepare_item(data, adapter, config) for segment in part]
    assert tuple(segment.shape.grid for segment in segments) == shape.grids
    assert len(segments) == {"2.6": 4, "4.0": 4, "4.5": 11}[version]
    assert shape.num_tokens == 64 * len(segments)
    times = [time for segment in segments for time in segment.times]
    assert times == (pytest.approx([(place + 0.5) * 38 / 11 for place in range(11)], abs=1) if version == "4.5" else [])


def test_frames_without_times_are_stills() -> None:
    config = EncoderConfig(model="tiny-minicpmv-2.6", max_slice_nums=1)
    adapter = load_adapter(config)
    data = make_clip(50, (160, 120), fps=25)
    (first, second) = (segment for part in prepare_item(data, adapter, config) for segment in part)
    header, _ = probe_item(data, adapter, config)
    for segment, frame in zip((first, second), Video(data, header).frames([0, 25]), strict=True):
        (still,) = adapter.prepare(frame)
        assert np.array_equal(segment.patches_PC, still.patches_PC)


def test_a_long_clip_goes_on_in_parts() -> None:
    """Of 16,384 patches: sixteen frames of a square clip."""
    config = EncoderConfig(model="random-minicpmv-2.6")
    parts = prepare_item(make_clip(18, (64, 64), fps=1), load_adapter(config), config)
    assert [len(part) for part in parts] == [16, 2]


def test_version_2_5_takes_no_video() -> None:
    assert not isinstance(load_adapter(EncoderConfig(model="tiny-minicpmv-2.5")), TakesVideo)
    assert isinstance(load_adapter(EncoderConfig(model="tiny-minicpmv-4.5")), MiniCPMVideo)


@pytest.mark.parametrize(
    ("clip", "count", "group", "first_numbers", "first_times", "last"),
    [
        ((500, 25.0), 60, 1, [4, 12, 20, 29], [2, 5], (495, 198)),
        ((1349, 29.97), 135, 1, [4, 14, 24, 34], [1, 5], (1344, 448)),
        ((2500, 25.0), 300, 2, [4, 12, 20, 29], [2, 5], (2495, 998)),
        ((90_000, 25.0), 540, 3, [83, 250, 416, 583], [33, 100], (89_916, 35_966)),
        ((35, 2.6), 40, 1, [0, 1, 2, 3], [0, 4], (34, 131)),
        ((200, 1.0), 540, 3, [0, 0, 0, 1], [0, 0], (199, 1990)),
        ((10, 1.0), 10, 1, [0, 1, 2, 3], [0, 10], (9, 90)),
    ],
)
def test_frames_and_times_are_those_of_the_card(
    clip: tuple[int, float],
    count: int,
    group: int,
    first_numbers: list[int],
    first_times: list[int],
    last: tuple[int, int],
) -> None:
    """Computed by the rule on the card of 4.5, with its search tree for times."""
    groups = choose_groups(*clip, VideoConfig())
    times = [time for one in groups.times for time in one]
    assert (len(groups.numbers), {len(one) for one in groups.times}) == (count, {group})
    assert (groups.numbers[:4], times[:2]) == (first_numbers, first_times)
    assert (groups.numbers[-1], times[-1]) == last


def test_options_ask_for_no_more_frames_than_there_are() -> None:
    assert choose_groups(7, 25.0, VideoConfig(num_frames=20)).numbers == list(range(7))
    assert choose_groups(7, 25.0, VideoConfig(min_frames=20)).numbers == list(range(7))


def test_long_clips_are_thinned_or_grouped() -> None:
    hour = 25 * 3600
    thinned = choose_frames(hour, 25.0, VideoConfig())
    assert len(thinned.numbers) == 64
    assert thinned.numbers[0] == 25 * 28, "the middle of the first of 64 equal parts of 3600 seconds"
    short, medium, long = (choose_groups(25 * seconds, 25.0, VideoConfig()) for seconds in (20, 100, 3600))
    assert (len(short.numbers), {len(group) for group in short.times}) == (60, {1})
    assert (len(medium.numbers), {len(group) for group in medium.times}) == (300, {2})
    assert (len(long.numbers), {len(group) for group in long.times}) == (540, {3})
    assert len(long.times) == 180
    assert len(choose_groups(hour, 25.0, VideoConfig(max_group_frames=6)).numbers) == 1080
    times = [time for group in long.times for time in group]
    assert times == sorted(times)
    assert times[-1] == pytest.approx(36_000, abs=100)
