"""Rotary positions of two axes: each head's columns turn by angles of the patch's row and of its column.

A head of K columns is two halves of K/2; column i of the first turns with column i of the second. The first K/4 angles
are the row's, the others the column's. Float32 throughout, rounded once.
"""

# Shapes: P rows (patches), E width = heads x K, K head width, N coordinates of a table.

from __future__ import annotations

import torch

from encoder.kernels.dispatch import runs_on_triton

THETA = 10_000.0


def rotary_tables(num_coordinates: int, head_width: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of one axis, float32 `[N, K/4]` each."""
    assert head_width % 4 == 0
    exponents = torch.arange(0, head_width // 2, 2, dtype=torch.float) / (head_width // 2)
    angles = torch.arange(num_coordinates, dtype=torch.float)[:, None] * (1.0 / THETA**exponents)
    return angles.cos().to(device), angles.sin().to(device)


def rotary_rows(
    tables: tuple[torch.Tensor, torch.Tensor], rows_P: torch.Tensor, columns_P: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of each patch, `[P, K/2]`."""
    cos, sin = (torch.cat([table[rows_P], table[columns_P]], dim=1) for table in tables)
    return cos, sin


def rotate_(qkv_P3E: torch.Tensor, cos_PK2: torch.Tensor, sin_PK2: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Turn the queries and keys of the fused projections in place; returns them. Tables may be of any float type, and
    columns of wider ones (unit stride along K/2)."""
    assert qkv_P3E.is_contiguous()
    assert cos_PK2.stride() == sin_PK2.stride()
    assert cos_PK2.stride(1) == 1
    assert qkv_P3E.shape[1] == 3 * num_heads * 2 * cos_PK2.shape[1]
    if runs_on_triton(qkv_P3E):
        from encoder.kernels.triton_rotary import launch_rotate

        return launch_rotate(qkv_P3E, cos_PK2, sin_PK2, num_heads)
    qk = qkv_P3E.view(len(qkv_P3E), 3, num_heads, -1)[:, :2]
    qk.copy_(rotate_reference(qk, cos_PK2, sin_PK2))
    return qkv_P3E


def rotate_reference(heads: torch.Tensor, cos_PK2: torch.Tensor, sin_PK2: torch.Tensor) -> torch.Tensor:
    """Twin of `rotate_` for heads `[P, ..., K]`, not in place."""
    middle = (1,) * (heads.dim() - 2)
    cos, sin = (table.view(len(table), *middle, -1) for table in (cos_PK2, sin_PK2))
    first, second = heads.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(heads.dtype)
