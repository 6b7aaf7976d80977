"""Our ragged attention inside transformers' modules.

transformers looks attention up by the name in a module's config. Some of its towers hand boundaries on to it and some
don't, so those of the run are bound around the whole forward instead. The name has to contain "flash", or towers cut
their rows apart on the host.
"""

# Shapes: P rows (patches), H heads, K head width.

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from encoder.attention import cross_attention, self_attention

NAME = "flash_encpool"


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundaries:
    """Segments of a run, for every attention within it that is not given others."""

    backend: str
    cu_seqlens: Tensor
    longest: int


# Foreign code calls the attention and passes nothing of ours on; the variable is set for one forward of one thread.
_bound: ContextVar[Boundaries] = ContextVar("boundaries")


def pool(query_1D: Tensor, key_PD: Tensor, value_PD: Tensor, num_heads: int) -> Tensor:
    """One query against the rows of each segment of the run: `[segments, D]`."""
    bound = _bound.get()
    return cross_attention(bound.backend, query_1D, key_PD, value_PD, bound.cu_seqlens, num_heads, bound.longest)


@contextmanager
def within(boundaries: Boundaries) -> Iterator[None]:
    """Bind the boundaries of a forward."""
    token = _bound.set(boundaries)
    try:
        yield
    finally:
        _bound.reset(token)


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
    """`[1, P, H, K]`; with offsets of its own (windows), a layer attends within those."""
    bound = _bound.get()
    _, num_heads, num_rows, head_width = query_1HPK.shape
    assert attention_mask is None, "packed segments have no mask"
    assert scaling is None or abs(scaling * head_width**0.5 - 1) < 1e-6
    qkv_P3HK = torch.stack([part[0].transpose(0, 1) for part in (query_1HPK, key_1HPK, value_1HPK)], dim=1)
    cu_seqlens = bound.cu_seqlens if cu_seq_lens_q is None else cu_seq_lens_q
    attend = self_attention(bound.backend, cu_seqlens, num_heads, head_width, bound.longest)
    return attend(qkv_P3HK.flatten(1)).view(1, num_rows, num_heads, head_width), None


def _refuse_masks(*_: Any, **__: Any) -> None:
    """Without a function here transformers would leave padding unmasked in silence; packed rows need no mask at all."""
    raise AssertionError("a module wants a mask of padding; call its parts instead")
