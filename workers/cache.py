"""`EmbeddingCache`: embeddings of earlier items in the worker's host memory, bounded in bytes.

What goes first is decided by GreedyDual-Size-Frequency (Cherkasova, "Improving WWW proxies performance with
Greedy-Dual-Size-Frequency caching policy", HP Labs HPL-98-69R1, 1998): an entry's rank is the milliseconds that its
hits have saved a byte, above the rank at which the last one was evicted. So what is dear, small or often asked for
stays, and what was once is overtaken in the end; among equals the least recently used goes first.
"""

# Shapes: T rows of an item, E width of a token.

from __future__ import annotations

import heapq
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from encoder.types import ItemShape

if TYPE_CHECKING:
    import torch

OVERHEAD_BYTES = 512  # of an entry beside its tokens: key, shape, rank
STALE_ENTRIES = 64  # ranks of old that the heap may hold beside as many as there are entries


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """Counts since the start, and what is there now."""

    hits: int = 0
    joins: int = 0  # items that waited for an identical one in progress
    misses: int = 0
    evictions: int = 0
    mismatches: int = 0  # entries found with another size than the item's: dropped, counted as misses too
    num_entries: int = 0
    used_bytes: int = 0
    max_bytes: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of items that cost no GPU time."""
        num_items = self.hits + self.joins + self.misses
        return (self.hits + self.joins) / num_items if num_items else 0.0


@dataclass(slots=True, eq=False)
class _Entry:
    tokens_TE: torch.Tensor
    shape: ItemShape
    num_bytes: int
    cost_ms: float
    num_uses: int
    rank: tuple[float, int]  # and a number that grows, for the order among equals


class EmbeddingCache:
    """Thread-safe. What `get` returns is shared: copy it out, never write to it."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._entries: dict[bytes, _Entry] = {}
        self._ranks: list[tuple[tuple[float, int], bytes]] = []  # a heap; an entry's older ranks are passed over
        self._used_bytes = 0
        self._floor = 0.0  # rank of what was evicted last
        self._counter = 0
        self._hits = self._misses = self._evictions = self._mismatches = 0

    def get(self, key: bytes, shape: ItemShape) -> torch.Tensor | None:
        """Tokens `[num_tokens, E]` kept under this key, if they are of an item of this shape."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None and (entry.shape.grids != shape.grids or len(entry.tokens_TE) != shape.num_tokens):
                self._mismatches += 1
                self._drop(key)
                entry = None
            if entry is None:
                self._misses += 1
                return None
            self._hits += 1
            entry.num_uses += 1
            self._rank(key, entry)
            return entry.tokens_TE

    def find(self, key: bytes) -> tuple[torch.Tensor, ItemShape] | None:
        """The same for one who does not know the item's shape. Counts as a use, not as a hit or miss."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            entry.num_uses += 1
            self._rank(key, entry)
            return entry.tokens_TE, entry.shape

    def put(self, key: bytes, tokens_TE: torch.Tensor, shape: ItemShape, *, cost_ms: float) -> None:
        """Keep tokens that belong to the cache from now on, and evict what has to make room.

        `cost_ms` is what computing them again would take. Tokens larger than the whole cache are not kept.
        """
        assert len(tokens_TE) == shape.num_tokens, "an item's rows are as many as its shape says"
        num_bytes = tokens_TE.nbytes + OVERHEAD_BYTES
        if num_bytes > self.max_bytes:
            return
        with self._lock:
            if key in self._entries:
                self._drop(key)
            while self._used_bytes + num_bytes > self.max_bytes:
                self._evict()
            entry = self._entries[key] = _Entry(tokens_TE, shape, num_bytes, cost_ms, 1, (0.0, 0))
            self._used_bytes += num_bytes
            self._rank(key, entry)

    def stats(self, *, joins: int = 0) -> CacheStats:
        """Counts and sizes; `joins` comes from who knows of items in progress, which were misses here."""
        with self._lock:
            return CacheStats(
                hits=self._hits,
                joins=joins,
                misses=self._misses - joins,
                evictions=self._evictions,
                mismatches=self._mismatches,
                num_entries=len(self._entries),
                used_bytes=self._used_bytes,
                max_bytes=self.max_bytes,
            )

    def _rank(self, key: bytes, entry: _Entry) -> None:
        self._counter += 1
        entry.rank = (self._floor + entry.num_uses * entry.cost_ms / entry.num_bytes, self._counter)
        heapq.heappush(self._ranks, (entry.rank, key))
        if len(self._ranks) > 2 * len(self._entries) + STALE_ENTRIES:
            self._ranks = [(entry.rank, key) for key, entry in self._entries.items()]
            heapq.heapify(self._ranks)

    def _evict(self) -> None:
        while True:
            rank, key = heapq.heappop(self._ranks)
            entry = self._entries.get(key)
            if entry is not None and entry.rank == rank:
                break
        self._floor = rank[0]
        self._evictions += 1
        self._drop(key)

    def _drop(self, key: bytes) -> None:
        self._used_bytes -= self._entries.pop(key).num_bytes
