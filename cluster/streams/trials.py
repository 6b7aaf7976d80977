"""What a client knows of dangerous content: who may try it again, where, and what is tried no more."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np

from cluster.routing.quarantine import Edition, News, Quarantine
from encoder.errors import PoisonItemError
from workers.cache_keys import content_digest

RECENT_S = 120.0
MAX_DOUBTS = 2
MAX_BLAMED = 4096  # contents of which deaths are remembered


class Trials:
    """Shared by all streams of a client. Thread-safe."""

    def __init__(
        self,
        *,
        quarantine_s: float = 3600.0,
        tell: Callable[[dict[bytes, float]], None] = lambda left_s: None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`tell` lets the pool know what this client put into quarantine, for `quarantine_s`."""
        self._quarantine_s = quarantine_s
        self._tell = tell
        self._now_s = now_s
        self._lock = threading.Lock()
        self._workers: set[str] = set()  # with an item on board that was on a dying worker
        self._poison = Quarantine(now_s=now_s)
        self._deaths: dict[str, float] = {}  # when workers died with no suspect on board, by incarnation
        # By digest: incarnations that died with such content on board, when, and whether it was alone in its call.
        self._died_on: dict[bytes, dict[str, tuple[float, bool]]] = {}
        self.heard: Edition | None = None  # of the router's quarantine

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

    @property
    def num_open(self) -> int:
        """Workers with such an item."""
        return len(self._workers)

    def note_death(self, incarnation: str) -> None:
        """A worker died, and no item on board had been on a dying worker before."""
        with self._lock:
            now_s = self._now_s()
            self._deaths = {name: when_s for name, when_s in self._deaths.items() if now_s - when_s < RECENT_S}
            self._deaths.setdefault(incarnation, now_s)

    def blame(self, encoded: np.ndarray, incarnation: str, *, alone: bool) -> int:
        """A worker died with this content on board; returns how many deaths speak against it.

        Those of the last RECENT_S when it was tried `alone` count each, those in company together as one: content that
        comes often is on board of many workers. Workers that died lately without it tell that they die for other
        reasons too: each counts for it, up to MAX_DOUBTS.
        """
        digest = content_digest(encoded.data)
        with self._lock:
            now_s = self._now_s()
            before = self._died_on.pop(digest, {})
            died_on = {name: death for name, death in before.items() if now_s - death[0] < RECENT_S}
            died_on[incarnation] = (now_s, alone)
            self._died_on[digest] = died_on
            if len(self._died_on) > MAX_BLAMED:
                del self._died_on[next(iter(self._died_on))]
            others = {name for name, when_s in self._deaths.items() if now_s - when_s < RECENT_S}.difference(died_on)
            num_alone = sum(was_alone for _, was_alone in died_on.values())
            return num_alone + (num_alone < len(died_on)) - min(MAX_DOUBTS, len(others))

    def refuse_poison(self, encoded: np.ndarray) -> None:
        """Raises PoisonItemError for content that is in quarantine."""
        if not len(self._poison):
            return
        digest = content_digest(encoded.data)
        if digest in self._poison:
            raise PoisonItemError(f"item {digest.hex()} is quarantined: workers died of it before")

    def quarantine(self, encoded: np.ndarray) -> str:
        """Refuse this content from now on, in the whole pool; returns its digest."""
        digest = content_digest(encoded.data)
        left_s = {digest: self._quarantine_s}
        with self._lock:
            self._poison.add(left_s)
        self._tell(left_s)
        return digest.hex()

    def hear(self, news: News | None) -> None:
        """What the router has in quarantine. One that has restarted is told what it forgot."""
        if news is None:
            return
        with self._lock:
            restarted = self.heard is None or self.heard.router != news.edition.router
            self.heard = news.edition
            self._poison.add(news.left_s)
            forgotten = self._poison.left_s(but=news.left_s) if restarted else {}
        if forgotten:
            self._tell(forgotten)

    @property
    def edition(self) -> Edition:
        """Changes whenever more content is refused."""
        return self._poison.edition
