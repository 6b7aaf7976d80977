"""Ragged attention over segments packed end to end, boundaries read on the device.

A launch depends on shapes alone (rows and number of segments), never on the boundaries' values: one captured graph
serves every mix of segment lengths. Rows beyond `cu_seqlens[-1]` are padding: never read as keys, and left unwritten.

On Hopper the work runs in `hopper_attention.cu`, on other GPUs in Triton (both follow FlashAttention: online softmax
in base 2, float32 accumulation), elsewhere in the plain torch twin.
"""

# Shapes: P rows (patches), S segments, H heads, K head width, E = H x K, Q queries of one segment.

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F

from encoder.kernels.dispatch import cuda_compiles, is_hopper, runs_on_triton
from encoder.kernels.fp8 import E4M3, quantise_rows


def ragged_attention(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    num_heads: int,
    *,
    scale: float | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Self-attention within each segment; `[P, E]`.

    `qkv` is the contiguous output of a fused projection, `[P, 3, H, K]` or `[P, 3 E]`. `cu_seqlens` is int32 `[S + 1]`
    on the same device, non-decreasing from 0; repeated offsets are empty segments. `scale` defaults to K ** -0.5.
    """
    num_rows = qkv.shape[0]
    qkv_P3E = qkv.reshape(num_rows, -1)
    width = qkv_P3E.shape[1] // 3
    head_width = width // num_heads
    assert qkv.is_contiguous()
    assert qkv_P3E.shape[1] == 3 * num_heads * head_width
    check_offsets(cu_seqlens)
    scale = head_width**-0.5 if scale is None else scale
    if out is None:
        out = torch.empty(num_rows, width, dtype=qkv.dtype, device=qkv.device)
    assert out.shape == (num_rows, width)
    assert out.is_contiguous()
    if qkv.is_cuda and is_hopper(qkv.device.index) and fits_hopper(head_width, qkv.dtype) and cuda_compiles():
        from encoder.kernels import hopper_attention

        hopper_attention.launch_self_attention(qkv_P3E, cu_seqlens, num_heads, scale, out)
        return out
    if runs_on_triton(qkv):
        from encoder.kernels import triton_attention

        triton_attention.launch_self_attention(qkv_P3E, cu_seqlens, num_heads, scale, out)
        return out
    return ragged_attention_reference(qkv_P3E, cu_seqlens, num_heads, scale=scale, out=out)


def ragged_attention_8(
    qkv: torch.Tensor, cu_seqlens: torch.Tensor, num_heads: int, mean_E: torch.Tensor, factor: float
) -> torch.Tensor:
    """`(ragged_attention - mean) * factor` in e4m3, `[P, E]`: rows as the next linear layer takes them.

    `mean_E` is float32. On Hopper it is the kernel's own last step.
    """
    head_width = mean_E.shape[0] // num_heads
    if not (qkv.is_cuda and is_hopper(qkv.device.index) and fits_hopper(head_width, qkv.dtype) and cuda_compiles()):
        return quantise_rows(ragged_attention(qkv, cu_seqlens, num_heads), factor, mean_D=mean_E)
    from encoder.kernels import hopper_attention

    assert qkv.is_contiguous()
    check_offsets(cu_seqlens)
    qkv_P3E = qkv.view(qkv.shape[0], -1)
    out = torch.empty(qkv.shape[0], mean_E.shape[0], dtype=E4M3, device=qkv.device)
    hopper_attention.launch_self_attention(
        qkv_P3E, cu_seqlens, num_heads, head_width**-0.5, out, mean_E=mean_E, factor=factor
    )
    return out


def ragged_cross_attention(
    q: torch.Tensor,
    k_PE: torch.Tensor,
    v_PE: torch.Tensor,
    cu_seqlens: torch.Tensor,
    num_heads: int,
    *,
    scale: float | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Each segment's queries attend to that segment's rows; `[S Q, E]`.

    `q` is `[Q, E]`, shared by all segments, or `[S, Q, E]`. `k_PE` and `v_PE` may be column slices of one tensor
    (unit stride along E). The output rows of an empty segment are zeros.
    """
    num_segments = cu_seqlens.shape[0] - 1
    num_queries, width = q.shape[-2:]
    assert q.is_contiguous()
    assert q.dim() == 2 or len(q) == num_segments
    assert k_PE.stride(1) == v_PE.stride(1) == 1
    check_offsets(cu_seqlens)
    scale = (width // num_heads) ** -0.5 if scale is None else scale
    if out is None:
        out = torch.empty(num_segments * num_queries, width, dtype=q.dtype, device=q.device)
    assert out.shape == (num_segments * num_queries, width)
    assert out.is_contiguous()
    if runs_on_triton(q):
        from encoder.kernels.triton_cross_attention import launch_cross_attention

        launch_cross_attention(q, k_PE, v_PE, cu_seqlens, num_heads, scale, out)
        return out
    return ragged_cross_attention_reference(q, k_PE, v_PE, cu_seqlens, num_heads, scale=scale, out=out)


def check_offsets(cu_seqlens: torch.Tensor) -> None:
    assert cu_seqlens.dtype == torch.int32
    assert cu_seqlens.is_contiguous()


def fits_hopper(head_width: int, dtype: torch.dtype) -> bool:
    return head_width % 8 == 0 and 16 <= head_width <= 128 and dtype in (torch.bfloat16, torch.float16)


def ragged_attention_reference(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    num_heads: int,
    *,
    scale: float | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Twin of `ragged_attention`; reads the boundaries on the host."""
    num_rows = qkv.shape[0]
    qkv_P3HK = qkv.reshape(num_rows, 3, num_heads, -1)
    if out is None:
        out = torch.empty(num_rows, num_heads * qkv_P3HK.shape[-1], dtype=qkv.dtype, device=qkv.device)
    offsets: list[int] = cu_seqlens.tolist()
    for begin, end in pairwise(offsets):
        if begin == end:
            continue
        q_1HNK, k_1HNK, v_1HNK = qkv_P3HK[begin:end].permute(1, 2, 0, 3).unsqueeze(1)
        context_1HNK = F.scaled_dot_product_attention(q_1HNK, k_1HNK, v_1HNK, scale=scale)
        out[begin:end] = context_1HNK[0].transpose(0, 1).reshape(end - begin, -1)
    return out


def ragged_cross_attention_reference(
    q: torch.Tensor,
    k_PE: torch.Tensor,
    v_PE: torch.Tensor,
    cu_seqlens: torch.Tensor,
    num_heads: int,
    *,
    scale: float | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Twin of `ragged_cross_attention`; reads the boundaries on the host."""
    offsets: list[int] = cu_seqlens.tolist()
    num_queries, width = q.shape[-2:]
    q_SQE = q.expand(len(offsets) - 1, num_queries, width)
    if out is None:
        out = torch.empty((len(offsets) - 1) * num_queries, width, dtype=q.dtype, device=q.device)
    out_SQE = out.view(-1, num_queries, width)
    for segment, (begin, end) in enumerate(pairwise(offsets)):
        if begin == end:
            out_SQE[segment] = 0
            continue
        q_1HQK, k_1HNK, v_1HNK = (
            rows.reshape(1, len(rows), num_heads, -1).transpose(1, 2)
            for rows in (q_SQE[segment], k_PE[begin:end], v_PE[begin:end])
        )
        context_1HQK = F.scaled_dot_product_attention(q_1HQK, k_1HNK, v_1HNK, scale=scale)
        out_SQE[segment] = context_1HQK[0].transpose(0, 1).reshape(num_queries, width)
    return out
