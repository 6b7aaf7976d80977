"""`Quarantine`: content that workers died of, by digest. Bounded, and forgiven after a time.

The router keeps one for the pool, and each client a copy that it hears of with its leases. A restarted router begins
an edition of its own, by which clients notice and tell it what they know; it forgets only what no client remembers.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

MAX_DIGESTS = 1024
"""Beyond it the oldest are forgiven."""


class Edition(NamedTuple):
    """A state of the router's list."""

    router: str  # another one after each restart
    number: int


class News(NamedTuple):
    """The router's list, for a client that knows another edition."""

    edition: Edition
    left_s: dict[bytes, float]  # by digest: how long it stays


class Quarantine:
    """Digests with the time of their release. One thread at a time."""

    def __init__(self, *, now_s: Callable[[], float], max_digests: int = MAX_DIGESTS) -> None:
        self._now_s = now_s
        self._max_digests = max_digests
        self._until_s: dict[bytes, float] = {}  # in the order in which they came
        self.edition = Edition(secrets.token_hex(4), 0)

    def __len__(self) -> int:
        return len(self._until_s)

    def __contains__(self, digest: bytes) -> bool:
        until_s = self._until_s.get(digest)
        return until_s is not None and self._now_s() < until_s

    def add(self, left_s: Mapping[bytes, float]) -> bool:
        """Keep these for so long, or for longer where they are in already; whether anything is new."""
        now_s = self._now_s()
        before = dict(self._until_s)
        for digest, seconds in left_s.items():
            if seconds > 0:
                self._until_s[digest] = max(now_s + seconds, self._until_s.get(digest, 0.0))
        for digest in [digest for digest, until_s in self._until_s.items() if until_s <= now_s]:
            del self._until_s[digest]
        while len(self._until_s) > self._max_digests:
            del self._until_s[next(iter(self._until_s))]
        is_new = any(digest not in before for digest in self._until_s)
        if is_new:
            self.edition = Edition(self.edition.router, self.edition.number + 1)
        return is_new

    def left_s(self, but: Collection[bytes] = ()) -> dict[bytes, float]:
        """What is in it, and for how long."""
        now_s = self._now_s()
        return {
            digest: until_s - now_s
            for digest, until_s in self._until_s.items()
            if until_s > now_s and digest not in but
        }

    def news(self, edition: Edition | None) -> News | None:
        """The list, unless this is the edition that is known."""
        if edition == self.edition or (edition is None and not self._until_s):
            return None
        return News(self.edition, self.left_s())
