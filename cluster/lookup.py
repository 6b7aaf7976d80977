"""`Lookup`: embeddings that a running pool has in its caches, by the digest of the encoded bytes. Encodes nothing."""

# Shapes: T rows of an item, E width of a token.

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import ray
import torch
from ray.exceptions import RayError

from cluster.lifecycle.actors import ROUTER, WorkerHandles, find_actor
from encoder.errors import WorkerStartError
from workers.cache_keys import short_digest
from workers.messages import EncodeResult


class Lookup:
    """Asks the router who got such content last, then that worker. What nobody answers in time counts as not there."""

    def __init__(self, router: Any, handle_of: Callable[[str], Any], *, timeout_s: float = 1.0) -> None:
        """`handle_of` gives the actor handle of a worker id, or raises ValueError."""
        self._router = router
        self._handle_of = handle_of
        self._timeout_s = timeout_s

    @classmethod
    def connect(cls, pool: str, *, ray_address: str | None = None, timeout_s: float = 1.0) -> Lookup:
        """Look up in the pool of this name, from any process of its Ray cluster.

        Raises WorkerStartError when there is no such cluster or pool.
        """
        try:
            if not ray.is_initialized():
                ray.init(address=ray_address or "auto", log_to_driver=False)
            router = find_actor(pool, ROUTER)
        except (ConnectionError, ValueError, RayError) as error:
            raise WorkerStartError(f"no pool {pool!r} at {ray_address or 'the Ray cluster here'}: {error}") from error
        return cls(router, WorkerHandles(pool).handle, timeout_s=timeout_s)

    def find(self, digests: Sequence[bytes], *, scope: str = "") -> list[torch.Tensor | None]:
        """Tokens `[T, E]` of each content, with memory of their own; None where no cache has them (any more)."""
        found: list[torch.Tensor | None] = [None] * len(digests)
        try:
            homes: list[str | None] = ray.get(
                self._router.homes.remote([short_digest(digest) for digest in digests]), timeout=self._timeout_s
            )
        except RayError:
            return found
        places: defaultdict[str, list[int]] = defaultdict(list)
        for place, home in enumerate(homes):
            if home is not None:
                places[home].append(place)
        calls = {}
        for worker_id, wanted in places.items():
            try:
                worker = self._handle_of(worker_id)
            except ValueError:  # it was just taken away
                continue
            calls[worker.find.remote([digests[place] for place in wanted], scope)] = wanted
        done = ray.wait(list(calls), num_returns=len(calls), timeout=self._timeout_s)[0] if calls else []
        for call in done:
            try:
                result: EncodeResult = ray.get(call, timeout=self._timeout_s)
            except RayError:
                continue
            for place, tokens_TE in zip(calls[call], _split(result), strict=True):
                found[place] = tokens_TE
        return found


def _split(result: EncodeResult) -> list[torch.Tensor | None]:
    offsets = result.offsets
    rows: list[torch.Tensor | None] = []
    for number, item in enumerate(result.items):
        if not item.cached:
            rows.append(None)
            continue
        tokens_TE = torch.from_numpy(result.tokens_TE[offsets[number] : offsets[number + 1]].copy())
        rows.append(tokens_TE.view(torch.bfloat16) if result.dtype == "bfloat16" else tokens_TE)
    return rows
