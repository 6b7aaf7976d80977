"""The twins of the Qwen-VL line's kernels against plain torch and transformers, on the CPU."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
import torch.nn.functional as F
from transformers.activations import ACT2FN
from transformers.models.qwen2_vl.modeling_qwen2_vl import apply_rotary_pos_emb_vision

from encoder.kernels.activations import gelu_, swiglu
from encoder.kernels.gather import add_weighted_rows_
from encoder.kernels.rotary import rotary_rows, rotary_tables, rotate_
from encoder.kernels.windows import window_attention


def angles(num_rows: int, head_width: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = (torch.randint(0, 30, (num_rows,), dtype=torch.int32) for _ in range(2))
    return rotary_rows(rotary_tables(32, head_width, torch.device("cpu")), rows, columns)


def wide(*tables: torch.Tensor) -> list[torch.Tensor]:
    """The same angles as the first half of a head's columns, as transformers has them."""
    return [torch.cat([table, table], 1)[:, : table.shape[1]] for table in tables]


@pytest.mark.parametrize("head_width", [32, 72, 80])
def test_queries_and_keys_turn_as_in_transformers_and_values_do_not(head_width: int) -> None:
    qkv = torch.randn(11, 3 * 2 * head_width)
    cos, sin = angles(11, head_width)
    q, k, v = qkv.view(11, 3, 2, head_width).clone().unbind(1)
    wanted = apply_rotary_pos_emb_vision(q, k, torch.cat([cos, cos], 1), torch.cat([sin, sin], 1))
    assert rotate_(qkv.clone(), *wide(cos, sin), 2).equal(rotate_(qkv, cos, sin, 2))
    for ours, theirs in zip(qkv.view(11, 3, 2, head_width).unbind(1), (*wanted, v), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_windows_attend_to_themselves_alone() -> None:
    lengths, num_heads, head_width = [16, 3, 0, 64], 2, 16
    num_rows = sum(lengths)
    cu_windows = torch.tensor([*accumulate(lengths, initial=0), num_rows, num_rows], dtype=torch.int32)
    qkv = torch.randn(num_rows + 5, 3 * num_heads * head_width)
    qkv[num_rows:] = float("nan")
    cos, sin = angles(len(qkv), head_width)
    q, k, v = rotate_(qkv.clone(), cos, sin, num_heads).view(len(qkv), 3, num_heads, head_width)[:num_rows].unbind(1)
    window = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    mask = window[:, None] == window[None, :]
    wanted = F.scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in (q, k, v)), attn_mask=mask)
    out = window_attention(qkv, cu_windows, cos, sin, num_heads)
    torch.testing.assert_close(out[:num_rows], wanted[0].transpose(0, 1).flatten(1))


def test_activations_are_those_of_transformers() -> None:
    x = torch.randn(7, 24)
    torch.testing.assert_close(gelu_(x.clone(), "exact"), ACT2FN["gelu"](x))
    torch.testing.assert_close(gelu_(x.clone(), "quick"), ACT2FN["quick_gelu"](x))
    torch.testing.assert_close(swiglu(x), ACT2FN["silu"](x[:, :12]) * x[:, 12:])


def test_weighted_table_rows_are_summed_in_place() -> None:
    x, table = torch.randn(5, 8), torch.randn(6, 8)
    ids, weights = torch.randint(0, 6, (5, 4), dtype=torch.int32), torch.rand(5, 4)
    wanted = x + F.embedding_bag(ids, table, per_sample_weights=weights, mode="sum")
    assert add_weighted_rows_(x, table, ids, weights) is x
    torch.testing.assert_close(x, wanted)
