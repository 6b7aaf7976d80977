"""Ragged cross-attention in Triton: a few queries a segment over all its rows (the resampler).

Keys and values are read once, so the memory is the limit. With few segments the keys are split over several programs
(FlashDecoding), which leave unnormalised partial sums in float32 for a second small kernel.
"""

# Shapes: S segments, Q queries of one segment, E = H x K, H heads, K head width, N splits of the keys.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from encoder.kernels.triton_attention import LOG2_E

KEYS = 64  # of one step
PROGRAMS_WANTED = 264  # two for each of 132 multiprocessors
MAX_SPLITS = 8


def splits_for(num_programs: int) -> int:
    """A power of two that brings the launch to `PROGRAMS_WANTED`; 1 (no second kernel) once it is near it."""
    splits = 1
    while splits < MAX_SPLITS and num_programs * splits * 3 < PROGRAMS_WANTED * 2:
        splits *= 2
    return splits


def launch_cross_attention(
    q: torch.Tensor,
    k_PE: torch.Tensor,
    v_PE: torch.Tensor,
    cu_seqlens: torch.Tensor,
    num_heads: int,
    scale: float,
    out_RE: torch.Tensor,
    num_splits: int | None = None,
) -> None:
    num_segments = cu_seqlens.shape[0] - 1
    num_queries, width = q.shape[-2:]
    head_width = width // num_heads
    columns = max(16, triton.next_power_of_2(head_width))  # the memory is the limit, not the products
    if out_RE.numel() == 0:
        return
    query_block = min(128, max(16, triton.next_power_of_2(num_queries)))
    blocks = triton.cdiv(num_queries, query_block)
    splits = num_splits or splits_for(num_segments * num_heads * blocks)
    rows = num_segments * num_queries
    if splits == 1:
        partial_NRE, stats_NRH2 = out_RE, out_RE
    else:
        partial_NRE = torch.empty(splits, rows, width, dtype=torch.float32, device=q.device)
        stats_NRH2 = torch.empty(splits, rows, num_heads, 2, dtype=torch.float32, device=q.device)
    _cross_attention_kernel[(num_heads, blocks * splits, num_segments)](
        q, k_PE, v_PE, cu_seqlens, partial_NRE, stats_NRH2, num_queries, rows,
        k_PE.stride(0), v_PE.stride(0), num_queries * width if q.dim() == 3 else 0, scale * LOG2_E,
        NUM_HEADS=num_heads, HEAD_WIDTH=head_width, COLUMNS=columns,
        QUERIES=query_block, KEYS=KEYS, SPLITS=splits, num_warps=4, num_stages=3,
    )  # fmt: skip
    if splits > 1:
        _combine_kernel[(rows, num_heads)](
            partial_NRE, stats_NRH2, out_RE, rows,
            NUM_HEADS=num_heads, HEAD_WIDTH=head_width, COLUMNS=columns,
            SPLITS=splits, num_warps=1,
        )  # fmt: skip


@triton.jit
def _cross_attention_kernel(
    q_ptr, k_ptr, v_ptr, cu_ptr, out_ptr, stats_ptr, num_queries, num_rows,
    k_stride, v_stride, q_segment_stride, scale,
    NUM_HEADS: tl.constexpr, HEAD_WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = NUM_HEADS * HEAD_WIDTH
    head, segment = tl.program_id(0), tl.program_id(2)
    block, split = tl.program_id(1) // SPLITS, tl.program_id(1) % SPLITS
    begin = tl.load(cu_ptr + segment).to(tl.int64)
    length = (tl.load(cu_ptr + segment + 1) - begin).to(tl.int32)
    share = tl.cdiv(tl.cdiv(length, SPLITS), KEYS) * KEYS
    first = split * share
    last = tl.minimum(first + share, length)

    query = block * QUERIES + tl.arange(0, QUERIES)
    column = tl.arange(0, COLUMNS)
    in_columns = column < HEAD_WIDTH
    in_queries = (query < num_queries)[:, None] & in_columns[None, :]
    q = tl.load(
        q_ptr + segment.to(tl.int64) * q_segment_stride + query[:, None] * WIDTH + head * HEAD_WIDTH + column[None, :],
        mask=in_queries,
        other=0.0,
    )
    peak = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, COLUMNS], tl.float32)
    k_base = k_ptr + begin * k_stride + head * HEAD_WIDTH
    v_base = v_ptr + begin * v_stride + head * HEAD_WIDTH
    for key in range(first, last, KEYS):
        row = key + tl.arange(0, KEYS)
        keep = (row < last)[:, None] & in_columns[None, :]
        k = tl.load(k_base + row.to(tl.int64)[:, None] * k_stride + column[None, :], mask=keep, other=0.0)
        v = tl.load(v_base + row.to(tl.int64)[:, None] * v_stride + column[None, :], mask=keep, other=0.0)
        scores = tl.where((row < last)[None, :], tl.dot(q, tl.trans(k)), -float("inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - new_peak[:, None])
        fade = tl.exp2(peak - new_peak)
        total = total * fade + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None])
        peak = new_peak

    out_row = segment.to(tl.int64) * num_queries + query
    place = out_row[:, None] * WIDTH + head * HEAD_WIDTH + column[None, :]
    if SPLITS == 1:
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty), mask=in_queries)
    else:
        split_row = split.to(tl.int64) * num_rows
        tl.store(out_ptr + split_row * WIDTH + place, acc, mask=in_queries)
        stats = stats_ptr + ((split_row + out_row) * NUM_HEADS + head) * 2
        tl.store(stats, peak, mask=query < num_queries)
        tl.store(stats + 1, total, mask=query < num_queries)


@triton.jit
def _combine_kernel(
    partial_ptr, stats_ptr, out_ptr, num_rows,
    NUM_HEADS: tl.constexpr, HEAD_WIDTH: tl.constexpr, COLUMNS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    split = tl.arange(0, SPLITS)
    split_row = split.to(tl.int64) * num_rows + row
    column = tl.arange(0, COLUMNS)
    stats = stats_ptr + (split_row * NUM_HEADS + head) * 2
    peaks, totals = tl.load(stats), tl.load(stats + 1)
    peak = tl.max(peaks, 0)
    # A split without keys has a peak of -inf and sums of 0; so have all splits of an empty segment.
    share = tl.where(totals > 0, tl.exp2(peaks - peak), 0.0)
    total = tl.sum(share * totals, 0)
    partial = tl.load(
        partial_ptr + (split_row[:, None] * NUM_HEADS + head) * HEAD_WIDTH + column[None, :],
        mask=(column < HEAD_WIDTH)[None, :],
        other=0.0,
    )
    value = tl.sum(partial * share[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(
        out_ptr + (row * NUM_HEADS + head) * HEAD_WIDTH + column,
        value.to(out_ptr.dtype.element_ty),
        mask=column < HEAD_WIDTH,
    )
