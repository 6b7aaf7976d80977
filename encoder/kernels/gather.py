"""Adding gathered table rows in place: key projections of two-dimensional positions, interpolated embeddings."""

# Shapes: P rows (patches), E width, N rows of a table, J rows of it that are summed.

from __future__ import annotations

import torch
import torch.nn.functional as F

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


def add_weighted_rows_(
    x_PE: torch.Tensor, table_NE: torch.Tensor, ids_PJ: torch.Tensor, weights_PJ: torch.Tensor
) -> torch.Tensor:
    """`x[p] += sum over j of weights[p, j] * table[ids[p, j]]`, summed in float32 and rounded once; returns x.

    Ids are int32, within the table; weights are float32.
    """
    assert x_PE.is_contiguous()
    assert ids_PJ.is_contiguous()
    assert weights_PJ.is_contiguous()
    if runs_on_triton(x_PE):
        from encoder.kernels.triton_gather import launch_add_weighted_rows

        return launch_add_weighted_rows(x_PE, table_NE, ids_PJ, weights_PJ)
    return x_PE.copy_(add_weighted_rows_reference(x_PE, table_NE, ids_PJ, weights_PJ))


def add_weighted_rows_reference(
    x_PE: torch.Tensor, table_NE: torch.Tensor, ids_PJ: torch.Tensor, weights_PJ: torch.Tensor
) -> torch.Tensor:
    """Twin of `add_weighted_rows_`, not in place."""
    summed_PE = F.embedding_bag(ids_PJ, table_NE.float(), per_sample_weights=weights_PJ, mode="sum")
    return (x_PE.float() + summed_PE).to(x_PE.dtype)
