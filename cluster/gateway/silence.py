"""Connections that bring no request are hung up on: whoever opens them needs no token, and descriptors are few.

aiohttp waits for the head of a connection's first request without end; between requests its own time holds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from typing import Protocol

KEEPALIVE_S = 75.0  # for a connection between two requests, as other servers have it; aiohttp's own is an hour
LONGEST_LOOK_S = 5.0


class Connection(Protocol):
    """What is needed of aiohttp's."""

    def force_close(self) -> None: ...


class Silence:
    """Which connections have not asked for anything yet, and since when. Belongs to one event loop."""

    def __init__(self, timeout_s: float, *, now_s: Callable[[], float] = time.monotonic) -> None:
        self._timeout_s = timeout_s
        self._now_s = now_s
        self._asked: set[object] = set()
        self._since_s: dict[Connection, float] = {}

    def heard(self, connection: object) -> None:
        """The head of a request came by it."""
        self._asked.add(connection)

    def look(self, connections: Collection[Connection]) -> None:
        """Hang up on those of the open connections that have been silent for too long."""
        now_s = self._now_s()
        self._asked.intersection_update(connections)
        silent = [connection for connection in connections if connection not in self._asked]
        self._since_s = {connection: self._since_s.get(connection, now_s) for connection in silent}
        for connection, since_s in self._since_s.items():
            if now_s - since_s >= self._timeout_s:
                connection.force_close()

    async def watch(self, connections: Callable[[], Collection[Connection]]) -> None:
        """Look at what is open again and again, until it is cancelled."""
        while True:
            await asyncio.sleep(min(LONGEST_LOOK_S, self._timeout_s / 4))
            self.look(connections())
