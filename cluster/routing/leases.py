"""What a client asks the router and what it hears back, and how both travel: many items a call, as plain tuples.

Ray pickles a call's arguments. A dataclass an item costs more there than the decision does, so a call carries each
distinct shape once and an index an item, and the answer repeats references that pickle writes once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cluster.routing.quarantine import Edition, News
from encoder.types import Grid, ItemShape
from workers.priority import Priority

Grant = tuple[str, str, str | None, float]
"""Worker, incarnation, graph and cost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRequest:
    """One item that a client wants to send."""

    shape: ItemShape
    num_bytes: int = 0  # encoded
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


class Ask(NamedTuple):
    """Items of one priority that a client wants to send, as they travel."""

    shapes: list[tuple[Grid, ...]]  # each distinct one once
    which: list[int]  # of them each item has
    sizes: list[int]  # of each item, in encoded bytes
    excluded: dict[int, frozenset[str]]  # exclusions of the items that have some
    digests: list[int]  # of each item's content; of no item when no worker has a cache
    priority: Priority = Priority.BATCH
    client: str = ""  # who asks
    edition: Edition | None = None  # of the quarantine that it knows
    traces: tuple[str, ...] = ()  # context of each item's span at the client, if any has one: see workers/spans.py
    model: str = ""  # of the pool's; the first one's without a name


class Answer(NamedTuple):
    """What became of each item, as it travels."""

    first: int  # lease id of the first item; the others' follow
    entries: list[Grant | Refusal]
    news: News | None = None  # of the quarantine, when the client's edition is not the latest


def pack(
    requests: Sequence[LeaseRequest],
    *,
    priority: Priority = Priority.BATCH,
    client: str = "",
    edition: Edition | None = None,
    traces: tuple[str, ...] = (),
    model: str = "",
) -> Ask:
    """Requests as they travel."""
    numbers: dict[tuple[Grid, ...], int] = {}
    digests = [request.digest for request in requests]
    return Ask(
        which=[numbers.setdefault(request.shape.grids, len(numbers)) for request in requests],
        shapes=list(numbers),
        sizes=[request.num_bytes for request in requests],
        excluded={index: frozenset(request.exclude) for index, request in enumerate(requests) if request.exclude},
        digests=digests if any(digests) else [],
        priority=priority,
        client=client,
        edition=edition,
        traces=traces,
        model=model,
    )


def unpack(answer: Answer) -> list[Lease | Refusal]:
    """A lease or a refusal for each request, in order."""
    return [
        entry if isinstance(entry, Refusal) else Lease(lease_id, *entry)
        for lease_id, entry in enumerate(answer.entries, answer.first)
    ]
