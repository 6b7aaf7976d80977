"""Ragged self-attention in Triton (FlashAttention-2 with a width split into two powers of two).

One program serves one block of queries of one head of one segment. It finds its segment itself, from a cumulative
sum over the segments' numbers of blocks; the grid holds the most blocks that any boundaries can need. This serves
GPUs other than Hopper. Every block of keys is masked: with a narrower last block of its own, Triton 3.6 made code for
split widths that left its shared memory.
"""

# Shapes: P rows (patches), S segments, H heads, K head width, E = H x K.

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from encoder.kernels.triton_widths import split_width

LOG2_E = 1.4426950408889634
MAX_SEGMENTS = 4096  # the cumulative sum lives in registers


class Tiling(NamedTuple):
    queries: int
    keys: int
    num_warps: int
    num_stages: int


def tiling_for(head_width: int) -> Tiling:
    """Measured on one H200 with heads of 72: the least of four tilings for 1, 4 and 16 segments of 1032 rows."""
    if head_width > 80:
        return Tiling(queries=128, keys=64, num_warps=8, num_stages=3)
    return Tiling(queries=64, keys=64, num_warps=4, num_stages=3)


def launch_self_attention(
    qkv_P3E: torch.Tensor,
    cu_seqlens: torch.Tensor,
    num_heads: int,
    scale: float,
    out_PE: torch.Tensor,
    tiling: Tiling | None = None,
) -> None:
    num_rows, width = out_PE.shape
    num_segments = cu_seqlens.shape[0] - 1
    if num_rows == 0 or num_segments == 0:
        return
    assert num_segments <= MAX_SEGMENTS, f"{num_segments} segments, at most {MAX_SEGMENTS} fit one launch"
    head_width = width // num_heads
    tiling = tiling or tiling_for(head_width)
    # Every segment adds at most one partly filled block.
    max_blocks = num_rows // tiling.queries + num_segments
    _self_attention_kernel[(max_blocks * num_heads,)](
        qkv_P3E, cu_seqlens, out_PE, num_segments, scale * LOG2_E,
        NUM_HEADS=num_heads, HEAD_WIDTH=head_width, **split_width(head_width),
        QUERIES=tiling.queries, KEYS=tiling.keys, SEGMENTS=triton.next_power_of_2(num_segments),
        num_warps=tiling.num_warps, num_stages=tiling.num_stages,
    )  # fmt: skip


@triton.jit
def _self_attention_kernel(
    qkv_ptr, cu_ptr, out_ptr, num_segments, scale,
    NUM_HEADS: tl.constexpr, HEAD_WIDTH: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = NUM_HEADS * HEAD_WIDTH
    STRIDE: tl.constexpr = 3 * WIDTH
    begin, length, head, first = find_block(tl.program_id(0), cu_ptr, num_segments, NUM_HEADS, QUERIES, SEGMENTS)
    if first < length:
        row = first + tl.arange(0, QUERIES)
        in_rows = row[:, None] < length
        base = qkv_ptr + begin.to(tl.int64) * STRIDE + head * HEAD_WIDTH
        head_column = tl.arange(0, HEAD)
        q0 = tl.load(
            base + row[:, None] * STRIDE + head_column[None, :],
            mask=in_rows & (head_column[None, :] < HEAD_WIDTH),
            other=0.0,
        )
        peak = tl.full([QUERIES], -float("inf"), tl.float32)
        total = tl.zeros([QUERIES], tl.float32)
        acc0 = tl.zeros([QUERIES, HEAD], tl.float32)
        if TAIL > 0:
            tail_column = HEAD + tl.arange(0, TAIL)
            q1 = tl.load(
                base + row[:, None] * STRIDE + tail_column[None, :],
                mask=in_rows & (tail_column[None, :] < HEAD_WIDTH),
                other=0.0,
            )
            acc1 = tl.zeros([QUERIES, TAIL], tl.float32)
        else:
            q1 = q0
            acc1 = acc0
        for key in range(0, length, KEYS):
            peak, total, acc0, acc1 = attend(
                q0, q1, base + WIDTH, key, length, scale, peak, total, acc0, acc1,
                STRIDE, WIDTH, HEAD_WIDTH, HEAD, TAIL, KEYS,
            )  # fmt: skip
        inverse = 1.0 / total
        out = out_ptr + begin.to(tl.int64) * WIDTH + head * HEAD_WIDTH
        tl.store(
            out + row[:, None] * WIDTH + head_column[None, :],
            (acc0 * inverse[:, None]).to(out_ptr.dtype.element_ty),
            mask=in_rows & (head_column[None, :] < HEAD_WIDTH),
        )
        if TAIL > 0:
            tl.store(
                out + row[:, None] * WIDTH + tail_column[None, :],
                (acc1 * inverse[:, None]).to(out_ptr.dtype.element_ty),
                mask=in_rows & (tail_column[None, :] < HEAD_WIDTH),
            )


@triton.jit
def find_block(block, cu_ptr, num_segments, NUM_HEADS: tl.constexpr, QUERIES: tl.constexpr, SEGMENTS: tl.constexpr):
    """Of one flat block number: the segment's first row and length, the head, the block's first row in the segment.

    Segments come one after another, in each the heads, in each the blocks, so that neighbours share keys in L2.
    A block beyond the last segment's gets a length of 0.
    """
    segment = tl.arange(0, SEGMENTS)
    inside = segment < num_segments
    begins = tl.load(cu_ptr + segment, mask=inside, other=0)
    lengths = tl.load(cu_ptr + segment + 1, mask=inside, other=0) - begins
    blocks = (lengths + QUERIES - 1) // QUERIES * NUM_HEADS
    ends = tl.cumsum(blocks, 0)
    mine = (ends - blocks <= block) & (block < ends)
    begin = tl.sum(tl.where(mine, begins, 0), 0)
    length = tl.sum(tl.where(mine, lengths, 0), 0)
    local = block - tl.sum(tl.where(mine, ends - blocks, 0), 0)
    per_head = tl.maximum((length + QUERIES - 1) // QUERIES, 1)
    return begin, length, local // per_head, local % per_head * QUERIES


@triton.jit
def attend(
    q0, q1, k_ptr, key, length, scale, peak, total, acc0, acc1,
    STRIDE: tl.constexpr, WIDTH: tl.constexpr, HEAD_WIDTH: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """One online-softmax step over KEYS keys; `scale` includes log2(e). `v` lies WIDTH columns after `k`."""
    row = key + tl.arange(0, KEYS)
    in_rows = row < length
    column = tl.arange(0, HEAD)
    keep = in_rows[:, None] & (column < HEAD_WIDTH)[None, :]
    place = row[:, None] * STRIDE + column[None, :]
    scores = tl.dot(q0, tl.trans(tl.load(k_ptr + place, mask=keep, other=0.0)))
    if TAIL > 0:
        tail = HEAD + tl.arange(0, TAIL)
        keep_tail = in_rows[:, None] & (tail < HEAD_WIDTH)[None, :]
        place_tail = row[:, None] * STRIDE + tail[None, :]
        scores = tl.dot(q1, tl.trans(tl.load(k_ptr + place_tail, mask=keep_tail, other=0.0)), scores)
    scores = tl.where(in_rows[None, :], scores, -float("inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1) * scale)
    weights = tl.exp2(scores * scale - new_peak[:, None])
    fade = tl.exp2(peak - new_peak)
    total = total * fade + tl.sum(weights, 1)
    v0 = tl.load(k_ptr + WIDTH + place, mask=keep, other=0.0)
    acc0 = tl.dot(weights.to(v0.dtype), v0, acc0 * fade[:, None])
    if TAIL > 0:
        v1 = tl.load(k_ptr + WIDTH + place_tail, mask=keep_tail, other=0.0)
        acc1 = tl.dot(weights.to(v1.dtype), v1, acc1 * fade[:, None])
    else:
        acc1 = acc0
    return new_peak, total, acc0, acc1
