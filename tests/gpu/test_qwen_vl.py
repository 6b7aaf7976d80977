"""The Qwen-VL line on a GPU: kernels against their twins, replay against eager and against transformers' own tower."""

from __future__ import annotations

import random
from itertools import accumulate

import pytest
import torch
from replaying import always_replay

from encoder.adapters.base import Segment
from encoder.adapters.qwen_vl import QwenVL
from encoder.attention import self_attention
from encoder.benchmark.qwen_vl import DrawnClip, QwenLoop
from encoder.config import EncoderConfig
from encoder.kernels.activations import gelu_, gelu_reference, swiglu, swiglu_reference
from encoder.kernels.attention import ragged_attention_reference
from encoder.kernels.rotary import rotary_rows, rotary_tables, rotate_, rotate_reference
from encoder.kernels.windows import window_attention
from encoder.packing import Replay
from encoder.pictures import draw_picture
from encoder.runner import EncoderRunner
from encoder.weights import random_tensors

pytestmark = pytest.mark.gpu

MODELS = ("random-qwen2-vl-7b", "random-qwen2.5-vl-7b", "random-qwen3-vl-8b")
SIZES = [(640, 480), (448, 448), (2000, 100), (1280, 720), (300, 200), (100, 1800), (1024, 1024), (60, 60)]
REPLAY_TOLERANCE = 2e-2
NUM_PAD_ROWS = 33


def distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours.float() - theirs.float()).norm() / theirs.float().norm())


def poisoned_qkv(lengths: list[int], width: int) -> torch.Tensor:
    qkv = torch.randn(sum(lengths) + NUM_PAD_ROWS, 3 * width, device="cuda", dtype=torch.bfloat16)
    qkv[sum(lengths) :] = float("nan")
    return qkv


def offsets(lengths: list[int], num_segments: int) -> torch.Tensor:
    ends = list(accumulate(lengths, initial=0))
    ends += [ends[-1]] * (num_segments - len(lengths))
    return torch.tensor(ends, dtype=torch.int32, device="cuda")


def angles(num_rows: int, head_width: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = (torch.randint(0, 60, (num_rows,), device="cuda") for _ in range(2))
    return rotary_rows(rotary_tables(64, head_width, torch.device("cuda")), rows, columns)


@pytest.mark.parametrize("head_width", [32, 64, 72, 80, 128])
def test_rotation_equals_its_twin(head_width: int) -> None:
    qkv = torch.randn(517, 3 * 16 * head_width, device="cuda", dtype=torch.bfloat16)
    cos, sin = angles(517, head_width)
    wanted = rotate_reference(qkv.view(517, 3, 16, -1)[:, :2], cos, sin)
    values = qkv.view(517, 3, 16, -1)[:, 2].clone()
    rotated = rotate_(qkv, cos, sin, 16).view(517, 3, 16, -1)
    assert torch.equal(rotated[:, 2], values)
    assert distance(rotated[:, :2], wanted) < 1e-3


def test_tables_of_rotation_may_be_columns_of_wider_ones_in_bfloat16() -> None:
    qkv = torch.randn(517, 3 * 16 * 72, device="cuda", dtype=torch.bfloat16)
    cos, sin = (torch.cat([table, table], dim=1).bfloat16()[:, :36] for table in angles(517, 72))
    wanted = rotate_reference(qkv.view(517, 3, 16, -1)[:, :2], cos, sin)
    assert distance(rotate_(qkv, cos, sin, 16).view(517, 3, 16, -1)[:, :2], wanted) < 1e-3


@pytest.mark.parametrize("head_width", [64, 72, 80, 128])
@pytest.mark.parametrize(
    "lengths", [[64] * 40, [64, 1, 0, 33, 64, 16, 64, 8] * 9, [4] * 300], ids=["whole", "mixed", "many"]
)
def test_window_attention_equals_its_twin(head_width: int, lengths: list[int]) -> None:
    qkv = poisoned_qkv(lengths, 16 * head_width)
    cu_windows, (cos, sin) = offsets(lengths, len(lengths) + 100), angles(len(qkv), head_width)
    exact = qkv.float().view(len(qkv), 3, 16, -1)
    exact[:, :2] = rotate_reference(exact[:, :2], cos, sin)
    wanted = ragged_attention_reference(exact.flatten(1), cu_windows, 16)
    out = window_attention(qkv, cu_windows, cos, sin, 16)
    assert distance(out[: sum(lengths)], wanted[: sum(lengths)]) < 6e-3


@pytest.mark.parametrize("backend", ["triton", "varlen"])
@pytest.mark.parametrize("head_width", [64, 80, 128])
def test_attention_of_the_other_widths(backend: str, head_width: int) -> None:
    lengths = [1564, 64, 4, 700, 3000]
    qkv = poisoned_qkv(lengths, 16 * head_width)
    cu_seqlens = offsets(lengths, 8)
    attend = self_attention(backend, cu_seqlens, 16, head_width, 3072)
    wanted = ragged_attention_reference(qkv.float(), cu_seqlens, 16)
    assert distance(attend(qkv)[: sum(lengths)], wanted[: sum(lengths)]) < 6e-3


@pytest.mark.parametrize("width", [96, 3456])
def test_activations_equal_their_twins(width: int) -> None:
    x = torch.randn(301, 2 * width, device="cuda", dtype=torch.bfloat16)
    assert distance(swiglu(x), swiglu_reference(x)) < 1e-3
    for kind in ("exact", "quick"):
        assert distance(gelu_(x.clone(), kind), gelu_reference(x, kind)) < 1e-3


@pytest.fixture(scope="module", params=MODELS)
def runner(request: pytest.FixtureRequest) -> EncoderRunner:
    made = EncoderRunner.from_config(EncoderConfig(model=request.param, token_budgets=(256, 1024, 4096)), "cuda:0")
    made.capture()
    return always_replay(made)


@pytest.fixture(scope="module")
def segments(runner: EncoderRunner) -> list[Segment]:
    pictures = [draw_picture(width, height, seed) for seed, (width, height) in enumerate(SIZES)]
    return [segment for picture in pictures for segment in runner.adapter.prepare(picture)]


@pytest.fixture(scope="module")
def loop(runner: EncoderRunner) -> QwenLoop:
    """transformers' own tower with the same weights."""
    assert isinstance(runner.adapter, QwenVL)
    weights = random_tensors(runner.adapter.weight_shapes(), runner.config.seed)
    return QwenLoop(runner.config, runner.adapter, weights, runner.device, runner.dtype)


def test_replays_of_changing_mixes_equal_transformers_and_eager(
    runner: EncoderRunner, segments: list[Segment], loop: QwenLoop
) -> None:
    wanted = [loop.encode((segment,)).cpu() for segment in segments]
    for segment, theirs in zip(segments, wanted, strict=True):
        (tokens,) = runner.finish(runner.submit([segment], Replay(key=None, taken=(0,))))
        assert distance(tokens, theirs) < 2 * REPLAY_TOLERANCE
    misses = runner.stats.misses.total()
    rng = random.Random(4)
    for _ in range(12):
        chosen = [rng.randrange(len(segments)) for _ in range(rng.randint(1, 12))]
        for index, tokens in zip(chosen, runner.encode([segments[index] for index in chosen]), strict=True):
            assert distance(tokens, wanted[index]) < 2 * REPLAY_TOLERANCE
    assert runner.stats.misses.total() == misses


def test_results_do_not_depend_on_neighbours(runner: EncoderRunner, segments: list[Segment]) -> None:
    budget = runner.plan([segment.shape for segment in segments[:4]])
    first = runner.encode(segments[:4])[0]
    others = [segments[0], *segments[5:8]]
    if runner.plan([segment.shape for segment in others]).key == budget.key:
        assert torch.equal(runner.encode(others)[0], first)
    else:
        assert distance(runner.encode(others)[0], first) < REPLAY_TOLERANCE


def test_a_clip_goes_through_several_replays(runner: EncoderRunner, loop: QwenLoop) -> None:
    adapter = runner.adapter
    assert isinstance(adapter, QwenVL)
    clip = list(adapter.prepare_video(DrawnClip(24, 1)))
    outputs, launches = runner.encode_traced(clip)
    assert len(launches) > 1
    assert all(launch.replay.key is not None for launch in launches)
    assert distance(torch.cat(outputs), loop.encode(tuple(clip)).cpu()) < 2 * REPLAY_TOLERANCE
