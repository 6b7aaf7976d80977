"""The fp8 kernels against their twins, and the fp8 tower against bfloat16."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
import torch.nn.functional as F
from replaying import always_replay

from encoder.config import EncoderConfig
from encoder.kernels.attention import ragged_attention_8, ragged_attention_reference
from encoder.kernels.fp8 import (
    LARGEST,
    Linear8,
    add_layer_norm_8,
    factor_for,
    layer_norm_8,
    quantise_rows,
    quantise_rows_reference,
    round_8,
)
from encoder.kernels.norms import add_layer_norm_reference
from encoder.pictures import draw_picture
from encoder.runner import EncoderRunner

pytestmark = pytest.mark.gpu


def nearly_equal(ours: torch.Tensor, twin: torch.Tensor) -> bool:
    """The same e4m3 numbers, or neighbours where rounding was on the edge."""
    ours, twin = ours.float(), twin.float()
    assert (ours != twin).float().mean() < 0.03
    return torch.allclose(ours, twin, rtol=0.13, atol=2**-9)


@pytest.mark.parametrize("width", [1152, 4304, 1024, 100])
@pytest.mark.parametrize("gelu", [False, True])
def test_quantised_rows_equal_the_twin(width: int, gelu: bool) -> None:
    x, mean = torch.randn(1037, width, device="cuda").bfloat16(), torch.randn(width, device="cuda")
    x[1000:] = float("nan")
    for mean_D in (None, mean):
        ours = quantise_rows(x, 32.0, gelu=gelu, mean_D=mean_D)
        assert nearly_equal(ours[:1000], quantise_rows_reference(x, 32.0, gelu=gelu, mean_D=mean_D)[:1000])


def test_large_numbers_are_clamped() -> None:
    x = torch.tensor([[3e4, -3e4, 1.0, 0.0]], device="cuda").bfloat16()
    assert quantise_rows(x, 1.0).float().tolist() == [[LARGEST, -LARGEST, 1.0, 0.0]]


@pytest.mark.parametrize("width", [1152, 3584])
def test_norms_equal_the_twin(width: int) -> None:
    x, delta = (torch.randn(1037, width, device="cuda").bfloat16() for _ in range(2))
    weight, bias, delta_bias = 16 * torch.randn(3, width, device="cuda")
    total, rows = add_layer_norm_8(x, delta, weight, bias, 1e-6, delta_bias)
    wanted, _ = add_layer_norm_reference(x, delta, weight, bias, 1e-6, delta_bias_D=delta_bias)
    exact = x.float() + delta.float() + delta_bias
    assert torch.equal(total, wanted)
    assert nearly_equal(rows, round_8(F.layer_norm(exact, (width,), weight, bias, 1e-6)))
    normed = layer_norm_8(x, weight, bias, 1e-6)
    assert nearly_equal(normed, round_8(F.layer_norm(x.float(), (width,), weight, bias, 1e-6)))


@pytest.mark.parametrize("num_rows", [1037, 9000])
def test_linear_is_near_float32(num_rows: int) -> None:
    """Both kernels that multiply: one scale for all, and a scale a row."""
    x, weight = torch.randn(num_rows, 1152, device="cuda").bfloat16(), torch.randn(4304, 1152, device="cuda")
    bias, factor = torch.randn(4304, device="cuda").bfloat16(), factor_for(5.0)
    linear = Linear8.of(round_8(weight * factor), factor, factor, bias)
    out = linear(quantise_rows(x, factor), torch.ones(num_rows, 1, device="cuda"))
    wanted = F.linear(x.float(), weight, bias.float())
    assert F.cosine_similarity(out.float(), wanted, dim=1).min() > 0.998


@pytest.mark.parametrize("head_width", [64, 72, 80, 128])
def test_attention_rounds_what_it_gives(head_width: int) -> None:
    lengths, heads = [1032, 1, 517, 0, 300], 4
    cu_seqlens = torch.tensor([0, *accumulate(lengths)], device="cuda", dtype=torch.int32)
    qkv = torch.randn(2000, 3 * heads * head_width, device="cuda").bfloat16()
    mean = torch.randn(heads * head_width, device="cuda")
    useful = sum(lengths)
    ours = ragged_attention_8(qkv, cu_seqlens, heads, mean, 64.0)[:useful]
    wanted = round_8((ragged_attention_reference(qkv.float(), cu_seqlens, heads)[:useful] - mean) * 64.0)
    assert torch.allclose(ours.float(), wanted.float(), rtol=0.13, atol=0.5)  # weights are rounded to bfloat16
    assert (ours.float() != wanted.float()).float().mean() < 0.1


def test_fp8_tokens_replayed_equal_eager_and_are_near_float32() -> None:
    config = EncoderConfig(model="random-minicpmv-2.6", precision="fp8", token_budgets=(64, 512))
    runner = EncoderRunner.from_config(config, "cuda:0")
    pictures = [draw_picture(width, height, 3) for width, height in ((640, 480), (224, 224), (1000, 300))]
    segments = [segment for picture in pictures for segment in runner.adapter.prepare(picture)]
    eager = runner.encode(segments)
    runner.capture()
    always_replay(runner)
    replayed = runner.encode(segments)
    exact = EncoderRunner.from_config(
        config.model_copy(update={"precision": "native", "dtype": "float32", "graphs": False}), "cuda:0"
    ).encode(segments)
    for ours, plain, wanted in zip(replayed, eager, exact, strict=True):
        assert (ours.float() - plain.float()).norm() / plain.float().norm() < 2e-2
        assert F.cosine_similarity(ours.float(), wanted, dim=1).min() > 0.999
    assert runner.encoder_id == "random-minicpmv-2.6@bfloat16+fp8"
    assert runner.stats.hits == len(segments)
