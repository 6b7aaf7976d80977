"""The engine on a GPU: replay against eager, eager against float32, and every way a graph can lie."""

from __future__ import annotations

import random
import warnings

import pytest
import torch
import torch.nn.functional as F
from replaying import always_replay

from encoder.adapters.base import Segment
from encoder.attention import self_attention
from encoder.config import EncoderConfig
from encoder.pictures import draw_picture
from encoder.runner import EncoderRunner
from encoder.towers.packed_vit import Block, Norm, run_blocks
from encoder.types import MissReason

pytestmark = pytest.mark.gpu

MODEL = "random-minicpmv-2.6"
SIZES = [(640, 480), (448, 448), (4000, 100), (1280, 720), (300, 200), (100, 4000), (1024, 1024), (200, 300)]
REPLAY_TOLERANCE = 2e-2
BF16_TOLERANCE = 3e-2


def make_runner(**changes: object) -> EncoderRunner:
    config = EncoderConfig.model_validate({"model": MODEL, "token_budgets": (64, 192, 512, 1024), **changes})
    runner = EncoderRunner.from_config(config, "cuda:0")
    runner.capture()
    return runner


@pytest.fixture(scope="module")
def packed() -> EncoderRunner:
    return always_replay(make_runner())


@pytest.fixture(scope="module")
def eager() -> EncoderRunner:
    return make_runner(graphs=False)


@pytest.fixture(scope="module")
def segments(eager: EncoderRunner) -> list[Segment]:
    pictures = [draw_picture(width, height, seed) for seed, (width, height) in enumerate(SIZES)]
    return [segment for picture in pictures for segment in eager.adapter.prepare(picture)]


@pytest.fixture(scope="module")
def expected(eager: EncoderRunner, segments: list[Segment]) -> list[torch.Tensor]:
    """Tokens of each segment alone, eagerly."""
    return [eager.encode([segment])[0].float() for segment in segments]


def distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours.float() - theirs.float()).norm() / theirs.float().norm())


@pytest.mark.parametrize("layouts", [("packed",), ("28x37", "32x32", "39x26", "packed"), ("vllm",)], ids=str)
def test_replay_equals_eager(
    layouts: tuple[str, ...], packed: EncoderRunner, segments: list[Segment], expected: list[torch.Tensor]
) -> None:
    runner = packed
    if layouts != ("packed",):
        runner = always_replay(make_runner(layouts=layouts, token_budgets=(64, 256)))
    for tokens, wanted in zip(runner.encode(segments), expected, strict=True):
        assert distance(tokens, wanted) < REPLAY_TOLERANCE
    assert runner.stats.hits > 0.7 * len(segments) or layouts == ("vllm",)  # which holds no strips


@pytest.mark.parametrize("backend", ["triton", "varlen", "cudnn"])
def test_attention_backends_agree(backend: str, segments: list[Segment], expected: list[torch.Tensor]) -> None:
    if backend == "cudnn":
        pytest.importorskip("cudnn")
    runner = always_replay(make_runner(attention=backend, token_budgets=(64, 512)))
    for tokens, wanted in zip(runner.encode(segments), expected, strict=True):
        assert distance(tokens, wanted) < REPLAY_TOLERANCE


def test_eager_bfloat16_is_near_float32(segments: list[Segment], expected: list[torch.Tensor]) -> None:
    runner = make_runner(dtype="float32", graphs=False)
    for tokens, wanted in zip(expected, runner.encode(segments), strict=True):
        assert distance(tokens, wanted) < BF16_TOLERANCE
        assert F.cosine_similarity(tokens, wanted, dim=1).min() > 0.999


def test_padding_that_costs_more_than_eager_is_not_replayed(eager: EncoderRunner) -> None:
    """A single slice in a rectangle for 4,900 patches: the runner has measured that eager is faster."""
    runner = make_runner(layouts=("<=70x70",), token_budgets=(512,))
    segment = eager.adapter.prepare(draw_picture(448, 448, 1))
    assert distance(runner.encode(segment)[0], eager.encode(segment)[0]) < REPLAY_TOLERANCE
    assert runner.stats.misses == {MissReason.SLOWER_THAN_EAGER: 1}


def test_small_large_small(packed: EncoderRunner, segments: list[Segment], expected: list[torch.Tensor]) -> None:
    for chosen in ([0], list(range(16)), [0], [3], list(range(20)), [3]):
        for index, tokens in zip(chosen, packed.encode([segments[index] for index in chosen]), strict=True):
            assert distance(tokens, expected[index]) < REPLAY_TOLERANCE


def test_equal_totals_with_other_boundaries_share_a_graph(
    packed: EncoderRunner, segments: list[Segment], expected: list[torch.Tensor]
) -> None:
    """A graph that baked its boundaries in would pass with one order and fail with the other."""
    by_length = sorted(range(len(segments)), key=lambda index: segments[index].shape.num_patches)
    chosen = [by_length[0], by_length[-1], by_length[len(by_length) // 2]]
    for order in (chosen, chosen[::-1], [chosen[1], chosen[0], chosen[2]]):
        for index, tokens in zip(order, packed.encode([segments[index] for index in order]), strict=True):
            assert distance(tokens, expected[index]) < REPLAY_TOLERANCE


def test_results_do_not_depend_on_neighbours(packed: EncoderRunner, segments: list[Segment]) -> None:
    """Same graph, other neighbours: the very same bits."""
    base = segments[:8]
    first = packed.encode(base)[0]
    for seed in range(5):
        others = random.Random(seed).sample(segments[8:], k=7)
        assert torch.equal(packed.encode([base[0], *others])[0], first)


def test_hot_path_has_no_host_sync(packed: EncoderRunner, segments: list[Segment]) -> None:
    chosen = segments[:8]
    packed.encode(chosen)  # buffers have grown
    replay = packed.plan([segment.shape for segment in chosen])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the mode a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        launch = packed.submit([chosen[index] for index in replay.taken], replay)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    packed.finish(launch)
    assert replay.key is not None


def test_result_read_late_is_not_overwritten(packed: EncoderRunner, segments: list[Segment]) -> None:
    """A launch's output is fetched after the next one of the same graph has run."""
    first, second = segments[:3], segments[3:6]
    wanted = packed.encode(first)
    replay = packed.plan([segment.shape for segment in first])
    launch = packed.submit(first, replay)
    later = packed.submit(second, packed.plan([segment.shape for segment in second]))
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(packed.finish(launch), wanted, strict=True))
    packed.finish(later)


def test_a_thousand_replays_with_changing_mixes(packed: EncoderRunner, segments: list[Segment]) -> None:
    """Two launches in flight throughout; every result has the checksum of its segment alone in the same graph."""
    rng = random.Random(11)
    alone: dict[tuple[int, object], float] = {}
    under_way = []
    for _ in range(1000):
        chosen = [rng.randrange(len(segments)) for _ in range(rng.randint(1, 6))]
        replay = packed.plan([segments[index].shape for index in chosen])
        taken = [chosen[index] for index in replay.taken]
        under_way.append((packed.submit([segments[index] for index in taken], replay), taken))
        if len(under_way) == 2:
            launch, indices = under_way.pop(0)
            for index, tokens in zip(indices, packed.finish(launch), strict=True):
                assert launch.replay.key is not None
                checksum = float(tokens.float().abs().sum())
                assert checksum == pytest.approx(alone.setdefault((index, launch.replay.key), checksum), rel=1e-6)
    packed.finish(under_way.pop()[0])
    assert len(alone) > len(segments)
    for (index, _), checksum in alone.items():
        assert checksum == pytest.approx(float(packed.encode([segments[index]])[0].float().abs().sum()), rel=5e-3)


def test_poisoned_pad_rows_stay_apart() -> None:
    """NaN in every pad row of a captured tower leaves the useful rows as they are."""
    width, heads, rows, useful = 1152, 16, 3200, 3000
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda").mul(scale).bfloat16()

    def norm() -> Norm:
        return Norm(weight=1 + draw(width, scale=0.1), bias=draw(width, scale=0.1))

    def linear(fan_out: int, fan_in: int) -> torch.Tensor:
        return draw(fan_out, fan_in, scale=fan_in**-0.5)

    blocks = [
        Block(
            norm1=norm(), qkv_weight=linear(3 * width, width), qkv_bias=draw(3 * width, scale=0.1),
            out_weight=linear(width, width), out_bias=draw(width, scale=0.1), norm2=norm(),
            fc1_weight=linear(4304, width), fc1_bias=draw(4304, scale=0.1),
            fc2_weight=linear(width, 4304), fc2_bias=draw(width, scale=0.1),
        )
        for _ in range(3)
    ]  # fmt: skip
    positions, ids = draw(4900, width), torch.zeros(rows, dtype=torch.int32, device="cuda")
    post_norm = norm()
    cu_seqlens = torch.tensor([0, 1032, 2046, useful, useful], dtype=torch.int32, device="cuda")
    x = draw(rows, width)

    def forward() -> torch.Tensor:
        attend = self_attention("triton", cu_seqlens, heads, width // heads, 1280)
        return run_blocks(x, positions, ids, blocks, post_norm, 1e-6, attend)

    with torch.inference_mode():
        clean = forward()[:useful].clone()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = forward()
        x[useful:] = float("nan")
        graph.replay()
        graph.replay()
        assert torch.equal(out[:useful], clean)
        assert out[useful:].isnan().any(), "the poison must reach the pads, or the test shows nothing"
