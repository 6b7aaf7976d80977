"""The fp8 twins on the CPU: near the numbers they stand for, each row by itself."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from encoder.attention import self_attention
from encoder.kernels.fp8 import E4M3, LARGEST, add_layer_norm_8, factor_for, layer_norm_8, quantise_rows
from encoder.towers import packed_vit_fp8
from encoder.towers.packed_vit import Block, Norm, run_blocks
from encoder.towers.packed_vit_fp8 import Seen, quantise_blocks, run_blocks_8
from encoder.towers.rounding import round_weights


def test_numbers_keep_three_bits_of_mantissa_in_fifteen_binades() -> None:
    x = torch.randn(7, 48) * torch.tensor([[0.02], [1.0], [20.0], [70.0], [1.0], [1.0], [0.0]])
    rows = quantise_rows(x, 1.0)
    assert rows.dtype == E4M3
    assert ((rows.float() - x).abs() <= (x.abs() / 16).clamp(min=2**-10)).all()
    assert torch.equal(quantise_rows(x, 0.5).float() * 2, quantise_rows(x, 0.5).float() / 0.5)


@pytest.mark.parametrize("largest", [1e-3, 0.9, 5.3, 448.0, 1e5])
def test_factors_are_powers_of_two_with_room(largest: float) -> None:
    factor = factor_for(largest)
    assert LARGEST / 4 < 2 * largest * factor <= LARGEST * 1.0001
    assert torch.tensor(factor).frexp().mantissa == 0.5


def test_what_exceeds_the_room_is_clamped() -> None:
    assert quantise_rows(torch.tensor([[1e6, -1e6]]), 1.0).float().tolist() == [[448.0, -448.0]]


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    x = torch.randn(4, 64)
    poisoned = x.clone()
    poisoned[2:] = float("nan")
    assert torch.equal(quantise_rows(x, 8.0).float()[:2], quantise_rows(poisoned, 8.0).float()[:2])


def test_gelu_mean_and_norm_come_before_the_rounding() -> None:
    x, delta, weight, bias, delta_bias = torch.randn(5, 32), torch.randn(5, 32), *torch.randn(3, 32)
    gelu, mean = F.gelu(x, approximate="tanh"), torch.randn(32)
    assert torch.equal(quantise_rows(x, 4.0, gelu=True).float(), quantise_rows(gelu, 4.0).float())
    assert torch.equal(quantise_rows(x, 4.0, gelu=True, mean_D=mean).float(), quantise_rows(gelu - mean, 4.0).float())
    total, rows = add_layer_norm_8(x, delta, weight, bias, 1e-6, delta_bias)
    assert torch.allclose(total, x + delta + delta_bias)
    normed = F.layer_norm(x + delta + delta_bias, (32,), weight, bias, 1e-6)
    assert torch.allclose(rows.float(), normed, atol=2**-9, rtol=0.07)
    assert torch.allclose(layer_norm_8(total, weight, bias, 1e-6).float(), normed, atol=2**-9, rtol=0.07)


def test_a_centred_norm_gives_what_its_linear_layer_was_made_for() -> None:
    rows, norm = torch.randn(50, 16) + 3, Norm(weight=torch.rand(16) + 0.5, bias=torch.randn(16))
    weight, bias = torch.randn(8, 16), torch.randn(8)
    normed = F.layer_norm(rows, (16,), norm.weight, norm.bias)
    centred, seen = Seen.of(normed).centred(norm)
    shifted = F.layer_norm(rows, (16,), centred.weight, centred.bias) / seen.factor
    assert torch.allclose(F.linear(shifted, weight, seen.bias(bias, weight)), F.linear(normed, weight, bias), atol=1e-4)


def test_weights_are_rounded_for_the_rows_they_meet() -> None:
    """Rows along a few directions: the error there shrinks, and weights stay within a step of where they were."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(2, 600, 3, generator=generator) @ torch.randn(2, 3, 200, generator=generator)
    rows += 0.3 * torch.randn(rows.shape, generator=generator)
    weights = 30 * torch.randn(2, 24, 200, generator=generator)
    covariances = rows.transpose(1, 2) @ rows / 600

    def error(rounded: torch.Tensor) -> float:
        return float((rows @ (rounded.float() - weights).transpose(1, 2)).norm())

    rounded = round_weights(weights, covariances)
    assert error(rounded) < 0.5 * error(weights.to(E4M3))
    assert F.cosine_similarity(rounded.float(), weights, dim=2).min() > 0.998
    alone = round_weights(weights, torch.eye(200).expand(2, 200, 200))
    assert torch.equal(alone.float(), weights.to(E4M3).float())


def test_layers_quantised_around_their_means_stay_near_the_exact_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """On rows that share most of their length, as deep layers do; without the means the error is far larger."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    width, hidden, rows = 64, 128, 96
    norms = [Norm(weight=1 + 0.1 * draw(width), bias=0.1 * draw(width)) for _ in range(5)]
    blocks = [
        Block(
            norm1=norms[2 * index],
            qkv_weight=draw(3 * width, width) / 8,
            qkv_bias=draw(3 * width) / 8,
            out_weight=draw(width, width) / 8,
            out_bias=draw(width) / 8,
            norm2=norms[2 * index + 1],
            fc1_weight=draw(hidden, width) / 8,
            fc1_bias=draw(hidden) / 8,
            fc2_weight=draw(width, hidden) / 11,
            fc2_bias=draw(width) / 8,
        )
        for index in range(2)
    ]
    x = 3 * draw(1, width) + draw(rows, width)
    positions, ids = torch.zeros(1, width), torch.zeros(rows, dtype=torch.int32)
    attend = self_attention("sdpa", torch.tensor([0, rows], dtype=torch.int32), 2, width // 2, rows)
    wanted = run_blocks(x, positions, ids, blocks, norms[4], 1e-6, attend)

    def error() -> float:
        quantised, _ = quantise_blocks(x, blocks, 1e-6, attend)
        ours = run_blocks_8(x, positions, ids, quantised, norms[4], 1e-6, attend)
        return float((ours - wanted).norm() / wanted.norm())

    centred = error()
    monkeypatch.setattr(packed_vit_fp8, "round_weights", lambda weights, _: weights.to(E4M3))
    monkeypatch.setattr(torch.Tensor, "mean", lambda self, *_: torch.zeros(self.shape[1]))
    plain = error()
    assert centred < 0.05
    assert plain > 1.5 * centred
