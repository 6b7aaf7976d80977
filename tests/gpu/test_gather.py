"""The gather-add kernel against its twin."""

from __future__ import annotations

import pytest
import torch

from encoder.kernels.gather import add_table_rows_, add_table_rows_reference


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
