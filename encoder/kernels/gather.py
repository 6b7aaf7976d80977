"""Adding gathered table rows in place: key projections of two-dimensional positions."""

# Shapes: P rows (patches), E width, N rows of a table.

from __future__ import annotations

import torch

from encoder.kernels.dispatch import runs_on_triton


def add_table_rows_(
    x_PE: torch.Tensor,
    first_NE: torch.Tensor,
    first_ids_P: torch.Tensor,
    second_NE: torch.Tensor,
    second_ids_P: torch.Tensor,
) -> torch.Tensor:
    """`x[p] += first[first_ids[p]] + second[second_ids[p]]`, summed in float32 and rounded once; returns x.

    `x_PE` may be a column slice of a wider tensor (unit stride along E). Ids are int32, within the tables.
    """
    assert x_PE.stride(1) == 1
    if runs_on_triton(x_PE):
        from encoder.kernels.triton_gather import launch_add_table_rows

        return launch_add_table_rows(x_PE, first_NE, first_ids_P, second_NE, second_ids_P)
    return x_PE.copy_(add_table_rows_reference(x_PE, first_NE, first_ids_P, second_NE, second_ids_P))


def add_table_rows_reference(
    x_PE: torch.Tensor,
    first_NE: torch.Tensor,
    first_ids_P: torch.Tensor,
    second_NE: torch.Tensor,
    second_ids_P: torch.Tensor,
) -> torch.Tensor:
    """Twin of `add_table_rows_`, not in place."""
    total_PE = x_PE.float() + first_NE[first_ids_P].float() + second_NE[second_ids_P].float()
    return total_PE.to(x_PE.dtype)
