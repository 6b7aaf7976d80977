"""The in-place gather-add's twin against plain indexing."""

from __future__ import annotations

import torch

from encoder.kernels.gather import add_table_rows_


def test_rows_of_both_tables_are_added_in_place_to_a_column_slice() -> None:
    wide = torch.randn(6, 16)
    before = wide.clone()
    first, second = torch.randn(4, 8), torch.randn(5, 8)
    first_ids, second_ids = torch.tensor([0, 3, 3, 1, 2, 0], dtype=torch.int32), torch.arange(6, dtype=torch.int32) % 5
    add_table_rows_(wide[:, :8], first, first_ids, second, second_ids)
    assert torch.allclose(wide[:, :8], before[:, :8] + first[first_ids] + second[second_ids], atol=1e-6)
    assert torch.equal(wide[:, 8:], before[:, 8:])
