"""What a client asks the router and what it hears back, and how both travel: many items a call, as plain tuples.

Ray pickles a call's arguments. A dataclass an item costs more there than the decision does, so a call carries each
distinct shape once and an index an item, and the answer repeats references that pickle writes once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from encoder.types import Grid, ItemShape

Ask = tuple[list[tuple[Grid, ...]], list[int], dict[int, frozenset[str]], list[int]]
"""The distinct shapes' grids, which of them each item has, the exclusions of the items that have some, and a digest of
each item's content; of no item when no worker has a cache."""

Grant = tuple[str, str, str | None, float]
"""Worker, incarnation, graph and cost."""

Answer = tuple[int, "list[Grant | Refusal]"]
"""First item's lease id, the others' follow, and what became of each item."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRequest:
    """One item that a client wants to send."""

    shape: ItemShape
    exclude: Collection[str] = frozenset()  # incarnations of workers it must not go to
    digest: int = 0  # of its content, when the pool's workers have caches: `workers.cache_keys.short_digest`


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Nobody takes the item now."""

    saturated: bool  # False: no worker is up that may take it
    retry_ms: float  # when to come back
    message: str


class Lease(NamedTuple):  # many are made: a tuple costs a third of a frozen dataclass
    """Permission to send an item to a worker. Ends when the worker reports it settled, dies, or time is up."""

    lease_id: int
    worker_id: str
    incarnation: str
    graph: str | None  # that takes most of it; None: eagerly
    cost_ms: float


def pack(requests: Sequence[LeaseRequest]) -> Ask:
    """Requests as they travel."""
    numbers: dict[tuple[Grid, ...], int] = {}
    which = [numbers.setdefault(request.shape.grids, len(numbers)) for request in requests]
    excluded = {index: frozenset(request.exclude) for index, request in enumerate(requests) if request.exclude}
    digests = [request.digest for request in requests]
    return list(numbers), which, excluded, digests if any(digests) else []


def unpack(answer: Answer) -> list[Lease | Refusal]:
    """A lease or a refusal for each request, in order."""
    first, entries = answer
    return [
        entry if isinstance(entry, Refusal) else Lease(lease_id, *entry)
        for lease_id, entry in enumerate(entries, first)
    ]
