"""Families on transformers' modules on a GPU: replay against eager, and bfloat16 against float32, in changing mixes."""

from __future__ import annotations

import random

import pytest
import torch
from clips import DrawnFrames
from family_cases import CASES
from replaying import always_replay

from encoder.adapters.base import Segment, TakesVideo
from encoder.adapters.registry import load_adapter
from encoder.config import EncoderConfig
from encoder.pictures import draw_picture
from encoder.runner import EncoderRunner

pytestmark = pytest.mark.gpu

SIZES = [(200, 120), (90, 200), (31, 47), (64, 64), (300, 40), (128, 128)]
REPLAY_TOLERANCE = 2e-2
BF16_TOLERANCE = 5e-2


def make_runner(config: EncoderConfig) -> EncoderRunner:
    runner = EncoderRunner.from_config(config, "cuda:0")
    runner.capture()
    return runner


def distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours.float() - theirs.float()).norm() / theirs.float().norm())


@pytest.mark.parametrize(("preset", "output"), sorted({(case.preset, case.output) for case in CASES}), ids=str)
def test_replay_equals_eager_in_changing_mixes(preset: str, output: str) -> None:
    config = EncoderConfig.model_validate({"model": preset, "output": output})
    adapter = load_adapter(config)
    tokens = adapter.sample((adapter.axes[0].keys[0],)).shape.num_tokens
    budgets = (tokens, 4 * tokens, 16 * tokens)
    captured = always_replay(make_runner(config.model_copy(update={"token_budgets": budgets})))
    assert captured.dtype == torch.bfloat16
    eager = make_runner(config.model_copy(update={"graphs": False}))
    exact = make_runner(config.model_copy(update={"graphs": False, "dtype": "float32"}))
    segments: list[Segment] = []
    sizes = next(case.sizes for case in CASES if case.preset == preset)
    for seed, (width, height) in enumerate([*SIZES, *sizes]):
        segments += adapter.prepare(draw_picture(width, height, seed))
    if isinstance(adapter, TakesVideo):
        segments += adapter.prepare_video(DrawnFrames(7))
    alone = [eager.encode([segment])[0] for segment in segments]
    for ours, wanted in zip(alone, exact.encode(segments), strict=True):
        assert distance(ours, wanted) < BF16_TOLERANCE
    rng = random.Random(0)
    for _ in range(5):
        chosen = rng.sample(range(len(segments)), k=rng.randint(1, len(segments)))
        for index, ours in zip(chosen, captured.encode([segments[index] for index in chosen]), strict=True):
            assert distance(ours, alone[index]) < REPLAY_TOLERANCE
    assert captured.stats.hits > 0
