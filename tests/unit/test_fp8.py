"""The fp8 twins on the CPU: near the numbers they stand for, each row by itself."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from encoder.kernels.fp8 import E4M3, Rows8, add_layer_norm_8, quantise_rows


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
    total, rows = add_layer_norm_8(x, delta, weight, bias, 1e-6, delta_bias)
    assert torch.allclose(total, x + delta + delta_bias)
    normed = F.layer_norm(x + delta + delta_bias, (32,), weight, bias, 1e-6)
    assert torch.allclose(restored(rows), restored(quantise_rows(normed)), atol=1e-4, rtol=0.07)
