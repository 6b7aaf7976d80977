"""The gather-add kernel against its twin."""

from __future__ import annotations

import pytest
import torch

from encoder.kernels.gather import (
    add_table_rows_,
    add_table_rows_reference,
    add_weighted_rows_,
    add_weighted_rows_reference,
)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [3584, 2560, 256])
def test_kernel_equals_its_twin(width: int) -> None:
    wide = torch.randn(1037, 2 * width, device="cuda").bfloat16()
    tables = [torch.randn(1280, width, device="cuda").bfloat16() for _ in range(2)]
    ids = [torch.randint(0, 1280, (1037,), device="cuda", dtype=torch.int32) for _ in range(2)]
    expected = add_table_rows_reference(wide[:, :width], tables[0], ids[0], tables[1], ids[1])
    untouched = wide[:, width:].clone()
    add_table_rows_(wide[:, :width], tables[0], ids[0], tables[1], ids[1])
    assert torch.equal(wide[:, :width], expected)
    assert torch.equal(wide[:, width:], untouched)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [1152, 1024, 64])
def test_weighted_rows_equal_their_twin(width: int) -> None:
    x = torch.randn(517, width, device="cuda").bfloat16()
    table = torch.randn(2304, width, device="cuda").bfloat16()
    ids = torch.randint(0, 2304, (517, 4), device="cuda", dtype=torch.int32)
    weights = torch.rand(517, 4, device="cuda")
    expected = add_weighted_rows_reference(x, table, ids, weights)
    add_weighted_rows_(x, table, ids, weights)
    assert (x.float() - expected.float()).abs().max() <= 2**-7 * expected.float().abs().max()
