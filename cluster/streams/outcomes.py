"""What becomes of a source: an embedding, or an error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.streams.sources import Source
from encoder.errors import EncoderPoolError
from encoder.types import ItemShape

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Embedding:
    """What the encoder made of one item."""

    tokens: torch.Tensor  # [num_tokens, hidden], on the CPU, with memory of its own
    shape: ItemShape
    graphs: tuple[str, ...]  # graphs that its segments ran in
    misses: tuple[str, ...]  # why segments of it ran eagerly, if any did
    timings: dict[str, float]  # milliseconds: cache, decode, wait, replay at the worker; call, total at the client
    note: str | None  # about the media, such as "first of 12 frames"
    worker: str
    cached: bool = False  # no GPU time went into it: kept from before, or computed for an identical item just then


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """One source's end: an embedding or an error."""

    source: Source
    embedding: Embedding | None
    error: EncoderPoolError | None
