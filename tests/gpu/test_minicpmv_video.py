"""MiniCPM-V 4.5 on a GPU: groups of frames and stills, replayed in changing mixes, against eager runs."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from replaying import always_replay

from encoder.adapters.base import Segment
from encoder.adapters.minicpmv_video import MiniCPMVideo
from encoder.config import EncoderConfig
from encoder.packing import Replay
from encoder.pictures import draw_picture
from encoder.runner import EncoderRunner

pytestmark = pytest.mark.gpu

MODEL = "random-minicpmv-4.5"
REPLAY_TOLERANCE = 2e-2


def group(adapter: MiniCPMVideo, size: tuple[int, int], times: tuple[int, ...]) -> Segment:
    """A segment of drawn frames without slices."""
    stills = [adapter.prepare(draw_picture(*size, time))[0] for time in times]
    _, rows, columns = stills[0].shape.grid
    return Segment(
        shape=adapter.measure((len(times), rows, columns)),
        patches_PC=np.concatenate([still.patches_PC for still in stills]),
        times=times,
    )


def test_replays_of_groups_and_stills_equal_eager_runs() -> None:
    runner = EncoderRunner.from_config(
        EncoderConfig(model=MODEL, token_budgets={"packed": (64, 256), "grouped": (64, 192)}), "cuda:0"
    )
    runner.capture()
    always_replay(runner)
    adapter = runner.adapter
    assert isinstance(adapter, MiniCPMVideo)
    segments = [
        group(adapter, (640, 480), (0, 3, 7)),
        group(adapter, (480, 640), (400,)),
        group(adapter, (448, 448), (11, 12)),
        *adapter.prepare(draw_picture(448, 448, 1)),
        group(adapter, (640, 480), (9, 13, 17)),
    ]
    alone = [runner.finish(runner.submit([segment], Replay(key=None, taken=(0,))))[0] for segment in segments]
    misses, rng = runner.stats.misses.total(), random.Random(2)
    for _ in range(8):
        chosen = [rng.randrange(len(segments)) for _ in range(rng.randint(1, 8))]
        for index, tokens in zip(chosen, runner.encode([segments[index] for index in chosen]), strict=True):
            difference = (tokens.float() - alone[index].float()).norm() / alone[index].float().norm()
            assert difference < REPLAY_TOLERANCE
    assert runner.stats.misses.total() == misses
    assert not torch.equal(alone[0], alone[4]), "other times and frames"
