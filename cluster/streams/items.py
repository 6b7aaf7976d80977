"""An item under way, and the account of those of one stream that have not ended."""

# Shapes: T rows of an item, E width of a token.

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

from cluster.routing.leases import Lease, Refusal
from cluster.streams.outcomes import Embedding, Outcome
from cluster.streams.sources import Source
from encoder.errors import EncoderPoolError
from encoder.types import ItemShape
from workers import spans
from workers.cache_keys import content_digest, short_digest
from workers.messages import EncodeResult, ItemResult
from workers.metrics import Meter
from workers.priority import Priority


@dataclass(eq=False)  # no slots: the digest is kept
class Item:
    """An open item."""

    source: Source
    encoded: np.ndarray
    shape: ItemShape
    note: str | None
    read_s: float
    timeout_s: float | None
    on_end: Callable[[Outcome], None]  # called once, in the thread that steps
    priority: Priority = Priority.INTERACTIVE
    scope: str | None = ""  # whose it is, for the workers' caches; None: they neither answer nor keep it
    not_before_s: float = 0.0
    refused_s: float | None = None  # since when nobody takes it
    is_suspect: bool = False  # it was on a worker that died
    exclude: set[str] = field(default_factory=set)
    turned_away: tuple[str, Refusal] | None = None  # incarnation that had no room for it just now, and what it said
    lease: Lease | None = None
    is_open: bool = True
    trace: str = field(default_factory=spans.current)  # what its owner was doing

    @cached_property
    def digest(self) -> int:
        """Of its content, as the router remembers it. Takes 0.4 ms for 600 KB, once."""
        return short_digest(content_digest(self.encoded.data))

    @property
    def avoided(self) -> frozenset[str]:
        """Incarnations of workers that it must not go to with the next lease."""
        return frozenset(self.exclude if self.turned_away is None else (*self.exclude, self.turned_away[0]))

    @property
    def deadline_s(self) -> float | None:
        """When it is too late."""
        return None if self.timeout_s is None else self.read_s + self.timeout_s


class OpenItems:
    """Counts the open items of a stream, and ends them: each exactly once."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self.num_bytes = 0  # encoded
        self.num_ended = 0
        self.progress_s = time.monotonic()  # when the stream last got on

    def open(self, item: Item) -> None:
        """From now on it counts."""
        self.num_bytes += item.encoded.nbytes

    def drop(self, item: Item) -> None:
        """Nobody awaits it any more: it will not end."""
        item.is_open = False
        self.num_bytes -= item.encoded.nbytes

    def finish(
        self, item: Item, answer: ItemResult, words_TE: np.ndarray, result: EncodeResult, call_ms: float
    ) -> None:
        """End an item with its rows of a call's array."""
        tokens_TE = torch.from_numpy(words_TE.copy())  # what Ray hands out is read-only and shared by the call
        if result.dtype == "bfloat16":
            tokens_TE = tokens_TE.view(torch.bfloat16)
        embedding = Embedding(
            tokens=tokens_TE,
            shape=item.shape,
            graphs=answer.graphs,
            misses=answer.misses,
            timings={
                **answer.timings_ms,
                "call": call_ms,
                "total": (time.monotonic() - item.read_s) * 1e3,
            },
            note=item.note,
            worker=result.worker_id,
            cached=answer.cached,
        )
        self._meter.observe("encpool_stage_seconds", "total", value=embedding.timings["total"] / 1e3)
        self._end(item, Outcome(source=item.source, embedding=embedding, error=None))

    def fail(self, item: Item, error: EncoderPoolError) -> None:
        """End an item with an error."""
        self._end(item, Outcome(source=item.source, embedding=None, error=error))

    def _end(self, item: Item, outcome: Outcome) -> None:
        if not item.is_open:  # cancelled meanwhile
            return
        self.drop(item)
        self.num_ended += 1
        self._meter.add("encpool_client_items_total", "ok" if outcome.error is None else type(outcome.error).__name__)
        item.on_end(outcome)
