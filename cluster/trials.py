"""What a client knows of dangerous content: who may try it again, where, and what is tried no more."""

from __future__ import annotations

import threading

import numpy as np

from encoder.errors import PoisonItemError
from workers.cache_keys import content_digest


class Trials:
    """Shared by all streams of a client. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._workers: set[str] = set()  # with an item on board that was on a dying worker
        self._poison: set[bytes] = set()  # digests of items that were on too many dying workers

    def begin(self, worker_id: str) -> bool:
        """Whether an item that was on a dying worker may go to this one: only when no other such item is there."""
        with self._lock:
            if worker_id in self._workers:
                return False
            self._workers.add(worker_id)
            return True

    def end(self, worker_id: str) -> None:
        """The item is no longer there."""
        with self._lock:
            self._workers.discard(worker_id)

    def refuse_poison(self, encoded: np.ndarray) -> None:
        """Raises PoisonItemError for content that is in quarantine."""
        if self._poison and digest(encoded) in self._poison:
            raise PoisonItemError(f"item {digest(encoded).hex()} is quarantined: workers died of it before")

    def quarantine(self, encoded: np.ndarray) -> str:
        """Refuse this content from now on; returns its digest."""
        self._poison.add(digest(encoded))
        return digest(encoded).hex()

    @property
    def num_poison(self) -> int:
        """How much content is in quarantine."""
        return len(self._poison)


def digest(encoded: np.ndarray) -> bytes:
    """Identity of an item's content."""
    return content_digest(encoded.data)
