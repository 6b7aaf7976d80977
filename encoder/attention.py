"""Ragged attention: rows of many segments laid end to end, each attending to its own segment alone.

Backends, fastest first on Hopper: `triton` (our kernel), `cudnn` (the cuDNN frontend's ragged SDPA), `varlen`
(FlashAttention 2 in torch) and `sdpa` (a loop over the segments: the reference, and the CPU's backend). All but
`sdpa` may be captured; boundaries are read on the device, so one capture serves any segment lengths.
"""

# Shapes: P rows (patches), S segments, Q queries a segment, H heads, K head width, D width = H x K.

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from encoder.errors import ConfigError
from encoder.kernels.attention import (
    ragged_attention,
    ragged_attention_8,
    ragged_attention_reference,
    ragged_cross_attention,
    ragged_cross_attention_reference,
)

if TYPE_CHECKING:
    from encoder.config import AttentionBackend

SelfAttention = Callable[[Tensor], Tensor]
"""From the fused projections `[P, 3D]` (queries, keys, values) to `[P, D]`."""


@dataclass(frozen=True, slots=True)
class RaggedAttention:
    """Our kernel with its boundaries."""

    cu_seqlens: Tensor
    num_heads: int

    def __call__(self, qkv: Tensor) -> Tensor:
        """A `SelfAttention`."""
        return ragged_attention(qkv, self.cu_seqlens, self.num_heads)

    def rounded(self, qkv: Tensor, mean_D: Tensor, factor: float) -> Tensor:
        """`(attention - mean) * factor` in e4m3."""
        return ragged_attention_8(qkv, self.cu_seqlens, self.num_heads, mean_D, factor)


def choose_backend(wanted: AttentionBackend, device: torch.device, dtype: torch.dtype) -> str:
    """The backend that `wanted` means on this device. Raises ConfigError for one that can't run there."""
    if device.type != "cuda":
        if wanted not in ("auto", "sdpa"):
            raise ConfigError(f"attention backend {wanted!r} needs a GPU; on {device.type} use 'sdpa' or 'auto'")
        return "sdpa"
    if wanted == "auto":
        if dtype == torch.float32:
            return "sdpa"
        return "triton" if importlib.util.find_spec("triton") else "varlen"
    if wanted != "sdpa" and dtype == torch.float32:
        raise ConfigError(f"attention backend {wanted!r} computes in 16 bits; use 'sdpa' with float32")
    needs = {"triton": "triton", "cudnn": "cudnn"}.get(wanted)
    if needs and not importlib.util.find_spec(needs):
        raise ConfigError(f"attention backend {wanted!r} needs the package {needs!r} (extra 'gpu')")
    return wanted


def capturable(backend: str, device: torch.device) -> bool:
    """Whether a CUDA graph may hold this backend: `sdpa` reads the boundaries on the host."""
    return device.type != "cuda" or backend != "sdpa"


def self_attention(backend: str, cu_seqlens: Tensor, num_heads: int, head_width: int, longest: int) -> SelfAttention:
    """Bind the boundaries once for all layers of a forward.

    Args:
        cu_seqlens: int32 `[S + 1]`; a repeated offset is an empty segment, rows after the last one are padding.
        longest: no segment is longer than this (baked into a capture by `cudnn` and `varlen`).
    """
    if backend == "triton":
        return RaggedAttention(cu_seqlens, num_heads)
    if backend == "cudnn":
        return _cudnn_attention(cu_seqlens, num_heads, head_width, longest)
    if backend == "varlen":

        def attend_varlen(qkv: Tensor) -> Tensor:
            q_PHK, k_PHK, v_PHK = qkv.view(-1, 3, num_heads, head_width).unbind(1)
            return varlen_attention(q_PHK, k_PHK, v_PHK, cu_seqlens, longest).flatten(1)

        return attend_varlen

    return lambda qkv: ragged_attention_reference(
        qkv, cu_seqlens, num_heads, out=qkv.new_zeros(qkv.shape[0], num_heads * head_width)
    )


def varlen_attention(q_PHK: Tensor, k_PHK: Tensor, v_PHK: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
    """FlashAttention 2 over the segments, `[P, H, K]`; rows may be strided."""
    from torch.nn.attention.varlen import varlen_attn

    out = varlen_attn(q_PHK, k_PHK, v_PHK, cu_seqlens, cu_seqlens, longest, longest)
    assert isinstance(out, Tensor)
    return out


def cross_attention(
    backend: str, q_QD: Tensor, k_PD: Tensor, v_PD: Tensor, cu_seqlens: Tensor, num_heads: int, longest: int
) -> Tensor:
    """The same Q queries against each segment's own rows: `[S * Q, D]`. An empty segment's rows are undefined."""
    num_segments, num_queries = cu_seqlens.shape[0] - 1, q_QD.shape[0]
    if backend == "triton":
        return ragged_cross_attention(q_QD, k_PD, v_PD, cu_seqlens, num_heads)
    if backend in ("varlen", "cudnn"):
        from torch.nn.attention.varlen import varlen_attn

        q = q_QD.repeat(num_segments, 1).unflatten(1, (num_heads, -1))
        cu_queries = torch.arange(num_segments + 1, device=q.device, dtype=torch.int32) * num_queries
        k, v = (rows.unflatten(1, (num_heads, -1)) for rows in (k_PD, v_PD))
        out = varlen_attn(q, k, v, cu_queries, cu_seqlens, num_queries, longest)
        assert isinstance(out, Tensor)
        return out.flatten(1)

    return ragged_cross_attention_reference(q_QD, k_PD, v_PD, cu_seqlens, num_heads)


def dense_self_attention(num_segments: int, num_heads: int, lengths: Tensor | None) -> SelfAttention:
    """Equal rectangles: `[S, L]` rows each; with `lengths` (int `[S]`) the rows beyond a segment's own are masked."""

    def attend(qkv: Tensor) -> Tensor:
        q, k, v = qkv.view(num_segments, -1, 3, num_heads, qkv.shape[1] // (3 * num_heads)).permute(2, 0, 3, 1, 4)
        mask = None if lengths is None else _key_mask(lengths, q.shape[2])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(0, 1).flatten(1)

    return attend


def dense_cross_attention(
    q_QD: Tensor, k_PD: Tensor, v_PD: Tensor, num_segments: int, num_heads: int, lengths: Tensor | None
) -> Tensor:
    """The same queries against each rectangle: `[S * Q, D]`."""
    k, v = (
        rows.unflatten(1, (num_heads, -1)).unflatten(0, (num_segments, -1)).transpose(1, 2) for rows in (k_PD, v_PD)
    )
    q = q_QD.unflatten(1, (num_heads, -1)).transpose(0, 1).expand(num_segments, -1, -1, -1)
    mask = None if lengths is None else _key_mask(lengths, k.shape[2])
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return out.transpose(1, 2).flatten(0, 1).flatten(1)


def _key_mask(lengths: Tensor, longest: int) -> Tensor:
    """True where a key takes part, `[S, 1, 1, L]`; an empty segment keeps one key, so that its softmax is finite."""
    valid = torch.arange(longest, device=lengths.device) < lengths.clamp(min=1)[:, None]
    return valid[:, None, None, :]


def _cudnn_attention(cu_seqlens: Tensor, num_heads: int, head_width: int, longest: int) -> SelfAttention:
    """cuDNN's ragged SDPA over the fused projections, read in place."""
    width = num_heads * head_width
    offsets = cu_seqlens.long().view(-1, 1, 1, 1)
    lengths = cu_seqlens.diff().view(-1, 1, 1, 1)
    qkv_offsets, out_offsets = offsets * (3 * width), offsets * width

    def attend(qkv: Tensor) -> Tensor:
        graph, tensors, workspace = _cudnn_graph(
            cu_seqlens.shape[0] - 1, longest, num_heads, head_width, qkv.dtype, qkv.device
        )
        import cudnn

        handle = _cudnn_handle(qkv.device)
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(qkv.device).cuda_stream)
        out = qkv.new_empty(qkv.shape[0], width)
        q, k, v = qkv.view(-1, 3, num_heads, head_width).unbind(1)
        values = (q, k, v, out, qkv_offsets, out_offsets, lengths, lengths)
        graph.execute(dict(zip(tensors, values, strict=True)), workspace, handle=handle)
        return out

    return attend


@lru_cache(maxsize=8)
def _cudnn_handle(device: torch.device) -> Any:
    import cudnn

    with torch.cuda.device(device):
        return cudnn.create_handle()


@cache  # a captured graph keeps pointing into its workspace
def _cudnn_graph(
    num_segments: int, longest: int, num_heads: int, head_width: int, dtype: torch.dtype, device: torch.device
) -> tuple[Any, tuple[Any, ...], Tensor]:
    """Build the plan for these sizes: (graph, its tensors in the order of `values` above, workspace)."""
    import cudnn

    io_type = {torch.bfloat16: cudnn.data_type.BFLOAT16, torch.float16: cudnn.data_type.HALF}[dtype]
    graph = cudnn.pygraph(
        io_data_type=io_type,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        handle=_cudnn_handle(device),
    )
    width = num_heads * head_width
    dim = [num_segments, num_heads, longest, head_width]
    stride = [longest * 3 * width, head_width, 3 * width, 1]
    q, k, v = (graph.tensor(name=name, dim=dim, stride=stride, data_type=io_type) for name in "qkv")
    offsets = torch.empty(num_segments + 1, 1, 1, 1, device=device, dtype=torch.int64)
    lengths = torch.empty(num_segments, 1, 1, 1, device=device, dtype=torch.int32)
    qkv_offsets, out_offsets = graph.tensor_like(offsets), graph.tensor_like(offsets)
    q_lengths, k_lengths = graph.tensor_like(lengths), graph.tensor_like(lengths)
    for tensor in (q, k, v):
        tensor.set_ragged_offset(qkv_offsets)
    out, _ = graph.sdpa(
        q=q,
        k=k,
        v=v,
        generate_stats=False,
        attn_scale=head_width**-0.5,
        use_padding_mask=True,
        seq_len_q=q_lengths,
        seq_len_kv=k_lengths,
    )
    out.set_output(True).set_dim(dim).set_stride([longest * width, head_width, width, 1])
    out.set_ragged_offset(out_offsets)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A])
    graph.check_support()
    graph.build_plans()
    workspace = torch.empty(max(1, graph.get_workspace_size()), device=device, dtype=torch.uint8)
    return graph, (q, k, v, out, qkv_offsets, out_offsets, q_lengths, k_lengths), workspace
