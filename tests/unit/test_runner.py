"""The runner on the CPU with the tiny models: results depend on the segment alone."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from encoder.adapters.base import Segment
from encoder.config import EncoderConfig
from encoder.errors import ConfigError
from encoder.media import MediaHeader
from encoder.pictures import draw_picture
from encoder.runner import EncoderRunner
from encoder.types import MissReason

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def runner() -> EncoderRunner:
    made = EncoderRunner.from_config(
        EncoderConfig(model="tiny-minicpmv-2.6", token_budgets=(64, 192), layouts=("packed", "<=26x39")), "cpu"
    )
    made.capture()
    return made


def segments_of(runner: EncoderRunner, sizes: list[tuple[int, int]]) -> list[Segment]:
    return [
        segment
        for seed, (width, height) in enumerate(sizes)
        for segment in runner.adapter.prepare(draw_picture(width, height, seed))
    ]


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert (ours - theirs).abs().max() <= TOLERANCE * theirs.abs().max()


def test_batch_neighbours_do_not_change_a_result(runner: EncoderRunner) -> None:
    segments = segments_of(runner, [(640, 480), (300, 200), (224, 224), (100, 900)])
    together = runner.encode(segments)
    for segment, tokens in zip(segments, together, strict=True):
        assert_close(tokens, runner.encode([segment])[0])


def test_permuting_a_batch_permutes_its_results(runner: EncoderRunner) -> None:
    segments = segments_of(runner, [(500, 375), (200, 300), (448, 448)])
    order = random.Random(5).sample(range(len(segments)), k=len(segments))
    straight = runner.encode(segments)
    for index, tokens in zip(order, runner.encode([segments[index] for index in order]), strict=True):
        assert_close(tokens, straight[index])


@given(st.lists(st.tuples(st.integers(1, 700), st.integers(1, 700)), min_size=1, max_size=2))
@settings(max_examples=6, deadline=None)
def test_predicted_tokens_equal_returned_rows(runner: EncoderRunner, sizes: list[tuple[int, int]]) -> None:
    for width, height in sizes:
        shape = runner.adapter.probe(MediaHeader(width=width, height=height, format="PNG", num_frames=1, note=None))
        tokens = runner.encode(runner.adapter.prepare(Image.new("RGB", (width, height), (200, 30, 90))))
        assert sum(len(rows) for rows in tokens) == shape.num_tokens
        assert len(tokens) == len(shape.grids)


def test_result_survives_the_next_launches(runner: EncoderRunner) -> None:
    first, second = segments_of(runner, [(448, 448)]), segments_of(runner, [(300, 300)])
    held = runner.encode(first)[0]
    copy = held.clone()
    for _ in range(4):
        runner.encode(second)
    assert torch.equal(held, copy)


def test_leftovers_of_other_runs_do_not_reach_a_result(runner: EncoderRunner) -> None:
    """Buffers keep old bytes: white pixels of a large batch must not become positions of a small one."""
    white = runner.adapter.prepare(Image.new("RGB", (900, 900), (255, 255, 255)))
    segment = segments_of(runner, [(448, 336)])
    fresh = EncoderRunner.from_config(runner.config, "cpu")
    expected = fresh.encode(segment)[0]  # eagerly: nothing captured
    runner.encode(white)
    assert_close(runner.encode(segment)[0], expected)


def test_fill_overwrites_every_number_but_unused_pixels(runner: EncoderRunner) -> None:
    adapter = runner.adapter
    segment = adapter.prepare(Image.new("RGB", (448, 448)))[:1]
    for axis_keys in (("packed",), ("<=26x39",)):
        capacity = adapter.capacity(axis_keys, 192)
        specs = adapter.inputs(axis_keys, capacity)
        filled = []
        for poison in (0x00, 0xFF):
            host = {
                name: np.full(int(np.prod(spec.shape)) * np.dtype(spec.dtype).itemsize, poison, dtype=np.uint8)
                .view(spec.dtype)
                .reshape(spec.shape)
                for name, spec in specs.items()
            }
            if axis_keys == ("<=26x39",):
                segment = adapter.prepare(Image.new("RGB", (300, 200)))[:1]
            rows = adapter.fill(host, segment, axis_keys, capacity)
            filled.append(host | {"pixels": host["pixels"][:rows]})
        assert all(np.array_equal(filled[0][name], filled[1][name]) for name in specs)


def test_strip_too_long_for_any_graph_runs_eagerly(runner: EncoderRunner) -> None:
    strip = runner.adapter.prepare(Image.new("RGB", (1, 32_000)))
    before = runner.stats.misses[MissReason.TOO_LARGE]
    tokens = runner.encode(strip)
    assert sum(len(rows) for rows in tokens) == 64 * len(strip)
    assert all(rows.isfinite().all() for rows in tokens)
    assert runner.stats.misses[MissReason.TOO_LARGE] > before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "tiny-minicpm-2.6"}, "did you mean 'tiny-minicpmv-2.6'"),
        ({"model": "tiny-foo"}, "it is no preset and no directory; `encpool models` lists the presets$"),
        ({"layouts": ("24x",)}, "unknown layout '24x'"),
        ({"layouts": ()}, "capture axis 'layout' has no keys"),
        ({"attention": "cudnn"}, "needs a GPU"),
        ({"precision": "fp8"}, "needs a GPU of compute capability 9.0"),
        ({"token_budgets": (32,)}, "holds no slice of 64 tokens"),
        ({"token_budgets": (64 * 10**15,)}, "is a graph of .* patches, which are numbered by 32 bits; name a smaller"),
        ({"layouts": ("100000x100000",)}, r"64 for \('100000x100000',\) is a graph of 10000000000 patches"),
    ],
)
def test_configuration_that_cannot_work_is_refused(changes: dict[str, object], message: str) -> None:
    config = EncoderConfig.model_validate({"model": "tiny-minicpmv-2.6", **changes})
    with pytest.raises(ConfigError, match=message):
        EncoderRunner.from_config(config, "cpu").capture()


def test_each_graph_counts_what_it_did(runner: EncoderRunner) -> None:
    runner.forget_stats()
    segments = segments_of(runner, [(640, 480), (300, 200), (224, 224)])
    _, launches = runner.encode_traced(segments)
    stats, capacity_of = runner.stats, {view.key: view.capacity for view in runner.graph_views()}
    keys = [launch.replay.key for launch in launches if launch.replay.key is not None]
    assert {key: use.replays for key, use in stats.uses.items()} == Counter(keys)
    assert (stats.num_replays, stats.hits, stats.hit_rate) == (len(keys), len(segments), 1)
    assert stats.useful_patches == sum(segment.shape.num_patches for segment in segments)
    assert stats.replayed_patches == sum(capacity_of[key].patches for key in keys)
    assert all(use.predicted_ms > 0 and use.real_ms > 0 for use in stats.uses.values())
