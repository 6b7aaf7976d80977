"""Attention over packed rows inside transformers' modules.

`fuse` exchanges the attention of every layer for ours, over the same weights: one projection gives queries, keys and
values side by side, positions turn them in place, and the kernel reads them where they lie. `attend_raggedly` leaves
the modules as they are and only keeps their attention within segments: what our graphs are measured beside.

Some towers hand boundaries on to their layers and some don't, so those of a run are bound around the whole forward.
"""

# Shapes: P rows (patches), D model width, H heads, K head width.

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from encoder.attention import cross_attention, self_attention, varlen_attention
from encoder.kernels.rotary import rotate_

NAME = "flash_encpool"
"""In the modules' configs. It has to contain "flash", or towers cut their rows apart on the host."""

_LAYERS = {"self_attn": True, "attention": True, "attn": False}
"""What layers call their attention, and whether they expect its weights beside what it gives."""

_OUTPUTS = ("out_proj", "o_proj", "proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundaries:
    """Segments of a run, for every attention within it that is not given others."""

    backend: str
    cu_seqlens: Tensor
    longest: int


# Foreign code calls the attention and passes nothing of ours on; the variable is set for one forward of one thread.
_bound: ContextVar[Boundaries] = ContextVar("boundaries")


@contextmanager
def within(boundaries: Boundaries) -> Iterator[None]:
    """Bind the boundaries of a forward."""
    token = _bound.set(boundaries)
    try:
        yield
    finally:
        _bound.reset(token)


def pool(query_1D: Tensor, key_PD: Tensor, value_PD: Tensor, num_heads: int) -> Tensor:
    """One query against the rows of each segment of the run: `[segments, D]`."""
    bound = _bound.get()
    return cross_attention(bound.backend, query_1D, key_PD, value_PD, bound.cu_seqlens, num_heads, bound.longest)


# Ours


def fuse(modules: Mapping[str, torch.nn.Module]) -> None:
    """Exchange the attention of every layer of these modules. Their weights are loaded, and where they will stay."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    attend_raggedly(modules)
    for layer in (part for module in modules.values() for part in module.modules()):
        if isinstance(layer, GradientCheckpointingLayer):
            name = next(name for name in _LAYERS if hasattr(layer, name))
            setattr(layer, name, PackedAttention(getattr(layer, name), with_weights=_LAYERS[name]))


class PackedAttention(torch.nn.Module):
    """In place of a layer's attention."""

    def __init__(self, stock: Any, *, with_weights: bool) -> None:
        super().__init__()
        linears = [stock.qkv] if hasattr(stock, "qkv") else [stock.q_proj, stock.k_proj, stock.v_proj]
        self._weight_3DD = torch.cat([linear.weight for linear in linears])
        biases = [linear.bias for linear in linears if linear.bias is not None]
        assert len(biases) in (0, len(linears))
        self._bias_3D = torch.cat(biases) if biases else None
        self._out = next(getattr(stock, name) for name in _OUTPUTS if hasattr(stock, name))
        self._num_heads, self._with_weights = stock.num_heads, with_weights
        self._head_width = len(self._weight_3DD) // (3 * self._num_heads)
        _check_scale(getattr(stock, "scaling", None) or stock.scale, self._head_width)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        cu_seqlens: Tensor | None = None,
        **others: Any,
    ) -> Tensor | tuple[Tensor, None]:
        """Rows `[P, D]` or `[1, P, D]`; with offsets of its own, a layer attends within those.

        `position_embeddings` are cosines and sines `[P, K]`, each half of a head's columns turned by the same.
        """
        assert attention_mask is None, "packed segments have no mask"
        bound, half = _bound.get(), self._head_width // 2
        x_PD = hidden_states.view(-1, hidden_states.shape[-1])
        qkv_P3D = torch.nn.functional.linear(x_PD, self._weight_3DD, self._bias_3D)
        if position_embeddings is not None:
            cos_PK2, sin_PK2 = (table[:, :half] for table in position_embeddings)
            rotate_(qkv_P3D, cos_PK2, sin_PK2, self._num_heads)
        cu_seqlens = bound.cu_seqlens if cu_seqlens is None else cu_seqlens
        attend = self_attention(bound.backend, cu_seqlens, self._num_heads, self._head_width, bound.longest)
        out: Tensor = self._out(attend(qkv_P3D)).view_as(hidden_states)
        return (out, None) if self._with_weights else out


# The modules' own


def attend_raggedly(modules: Mapping[str, torch.nn.Module]) -> None:
    """Have these modules attend within the boundaries that are bound.

    The field of their configs is set directly, and after they are made: transformers' own ways look up a name that
    contains "flash" on a hub.
    """
    _register()
    for module in modules.values():
        for part in module.modules():
            if hasattr(getattr(part, "config", None), "_attn_implementation"):
                part.config._attn_implementation = NAME  # type: ignore[union-attr]


@cache
def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, _refuse_masks)


def _attend(
    module: torch.nn.Module,
    query_1HPK: Tensor,
    key_1HPK: Tensor,
    value_1HPK: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """`[1, P, H, K]`, as transformers calls attention; with offsets of its own, a layer attends within those."""
    assert attention_mask is None, "packed segments have no mask"
    bound = _bound.get()
    _, num_heads, num_rows, head_width = query_1HPK.shape
    if scaling is not None:
        _check_scale(scaling, head_width)
    cu_seqlens = bound.cu_seqlens if cu_seq_lens_q is None else cu_seq_lens_q
    q_PHK, k_PHK, v_PHK = (part[0].transpose(0, 1) for part in (query_1HPK, key_1HPK, value_1HPK))
    if bound.backend == "varlen":
        return varlen_attention(q_PHK, k_PHK, v_PHK, cu_seqlens, bound.longest)[None], None
    attend = self_attention(bound.backend, cu_seqlens, num_heads, head_width, bound.longest)
    qkv_P3HK = torch.stack([q_PHK, k_PHK, v_PHK], dim=1)
    return attend(qkv_P3HK.flatten(1)).view(1, num_rows, num_heads, head_width), None


def _check_scale(scale: float, head_width: int) -> None:
    assert abs(scale * head_width**0.5 - 1) < 1e-6, f"attention scaled by {scale}"


def _refuse_masks(*_: Any, **__: Any) -> None:
    """Without a function here transformers would leave padding unmasked in silence; packed rows need no mask at all."""
    raise AssertionError("a module wants a mask of padding; call its parts instead")
