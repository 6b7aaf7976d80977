"""The fp8 twins on the CPU: near the numbers they stand for, each row by itself."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from encoder.attention import self_attention
from encoder.kernels.fp8 import E4M3, Linear8, Rows8, add_layer_norm_8, quantise_rows
from encoder.towers.packed_vit import Block, Norm, run_blocks
from encoder.towers.packed_vit_fp8 import Block8, quantise_blocks, run_blocks_8


def restored(rows: Rows8) -> torch.Tensor:
    return rows.values_PD.float() * rows.scale_P1


def test_rows_keep_three_bits_of_mantissa() -> None:
    x = torch.randn(7, 48) * torch.tensor([[1e-3], [1.0], [50.0], [1e4], [1.0], [1.0], [0.0]])
    rows = quantise_rows(x)
    assert rows.values_PD.dtype == E4M3
    assert ((restored(rows) - x).abs() <= x.abs() / 16 + rows.scale_P1 * 2**-9).all()
    assert torch.allclose(restored(rows).abs().amax(1), x.abs().amax(1), rtol=1e-6)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    x = torch.randn(4, 64)
    poisoned = x.clone()
    poisoned[2:] = float("nan")
    assert torch.equal(restored(quantise_rows(x))[:2], restored(quantise_rows(poisoned))[:2])


def test_gelu_and_norm_come_before_the_scale() -> None:
    x, delta, weight, bias, delta_bias = torch.randn(5, 32), torch.randn(5, 32), *torch.randn(3, 32)
    gelu = F.gelu(x, approximate="tanh")
    assert torch.equal(restored(quantise_rows(x, gelu=True)), restored(quantise_rows(gelu)))
    mean = torch.randn(32)
    assert torch.equal(restored(quantise_rows(x, gelu=True, mean_D=mean)), restored(quantise_rows(gelu - mean)))
    total, rows = add_layer_norm_8(x, delta, weight, bias, 1e-6, delta_bias)
    assert torch.allclose(total, x + delta + delta_bias)
    normed = F.layer_norm(x + delta + delta_bias, (32,), weight, bias, 1e-6)
    assert torch.allclose(restored(rows), restored(quantise_rows(normed)), atol=1e-4, rtol=0.07)


def test_layers_quantised_around_their_means_stay_near_the_exact_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """On rows that share most of their length, as deep layers do; without the means the error is far larger."""

    def multiply(linear: Linear8, rows: Rows8) -> torch.Tensor:
        weight = linear.weight_ND.float() * linear.scale_1N.t()
        return F.linear(restored(rows), weight, linear.bias_N)

    monkeypatch.setattr(Linear8, "__call__", multiply)  # no CPU multiplies e4m3
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

    def error(quantised: list[Block8]) -> float:
        ours = run_blocks_8(x, positions, ids, quantised, norms[4], 1e-6, attend)
        return float((ours - wanted).norm() / wanted.norm())

    centred = error(quantise_blocks(x, blocks, 1e-6, attend))
    monkeypatch.setattr(torch.Tensor, "mean", lambda self, *_: torch.zeros(self.shape[1]))
    plain = error(quantise_blocks(x, blocks, 1e-6, attend))
    assert centred < 0.05
    assert plain > 1.5 * centred
