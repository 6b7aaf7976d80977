"""The fp8 kernels against their twins, and the fp8 tower against bfloat16."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from encoder.config import EncoderConfig
from encoder.kernels.fp8 import Linear8, Rows8, add_layer_norm_8, quantise_rows, quantise_rows_reference
from encoder.kernels.norms import add_layer_norm_reference
from encoder.pictures import draw_picture
from encoder.runner import EncoderRunner

pytestmark = pytest.mark.gpu


def restored(rows: Rows8) -> torch.Tensor:
    return rows.values_PD.float() * rows.scale_P1


@pytest.mark.parametrize("width", [1152, 4304, 1024, 100])
@pytest.mark.parametrize("gelu", [False, True])
def test_quantised_rows_equal_the_twin(width: int, gelu: bool) -> None:
    x = torch.randn(1037, width, device="cuda").bfloat16()
    x[1000:] = float("nan")
    ours, twin = quantise_rows(x, gelu=gelu), quantise_rows_reference(x, gelu=gelu)
    assert torch.allclose(ours.scale_P1[:1000], twin.scale_P1[:1000], rtol=1e-5)
    different = ours.values_PD[:1000].float() != twin.values_PD[:1000].float()
    assert different.float().mean() < 0.02  # where rounding was on the edge
    assert torch.allclose(restored(ours)[:1000], restored(twin)[:1000], rtol=0.13, atol=1e-5)


def test_add_norm_equals_the_twin() -> None:
    x, delta = (torch.randn(1037, 1152, device="cuda").bfloat16() for _ in range(2))
    weight, bias, delta_bias = (torch.randn(1152, device="cuda").bfloat16() for _ in range(3))
    total, rows = add_layer_norm_8(x, delta, weight, bias, 1e-6, delta_bias)
    wanted, normed = add_layer_norm_reference(x, delta, weight, bias, 1e-6, delta_bias_D=delta_bias)
    assert torch.equal(total, wanted)
    assert F.cosine_similarity(restored(rows), normed.float(), dim=1).min() > 0.999


def test_linear_is_near_float32() -> None:
    x, weight, bias = (torch.randn(*shape, device="cuda").bfloat16() for shape in ((1037, 1152), (4304, 1152), (4304,)))
    out = Linear8.of(weight, bias)(quantise_rows(x))
    wanted = F.linear(x.float(), weight.float(), bias.float())
    assert F.cosine_similarity(out.float(), wanted, dim=1).min() > 0.998


def test_fp8_tokens_replayed_equal_eager_and_are_near_float32() -> None:
    config = EncoderConfig(model="random-minicpmv-2.6", precision="fp8", token_budgets=(64, 512))
    runner = EncoderRunner.from_config(config, "cuda:0")
    pictures = [draw_picture(width, height, 3) for width, height in ((640, 480), (224, 224), (1000, 300))]
    segments = [segment for picture in pictures for segment in runner.adapter.prepare(picture)]
    eager = runner.encode(segments)
    runner.capture()
    replayed = runner.encode(segments)
    exact = EncoderRunner.from_config(
        config.model_copy(update={"precision": "native", "dtype": "float32", "graphs": False}), "cuda:0"
    ).encode(segments)
    for ours, plain, wanted in zip(replayed, eager, exact, strict=True):
        assert (ours.float() - plain.float()).norm() / plain.float().norm() < 2e-2
        assert F.cosine_similarity(ours.float(), wanted, dim=1).min() > 0.998
    assert runner.encoder_id == "random-minicpmv-2.6@bfloat16+fp8"
    assert runner.stats.hits == len(segments)
