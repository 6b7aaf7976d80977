"""`Patience`: when a request that was put off is asked again, and when no more."""

from __future__ import annotations

import random
import time
from asyncio import sleep

FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 10.0  # where nobody says when to come back; twice as long each time


class Patience:
    """Of one request, from now on."""

    def __init__(self, patience_s: float, rng: random.Random) -> None:
        self._rng = rng
        self._started_s = time.monotonic()
        self._until_s = self._started_s + patience_s
        self._wait_s = FIRST_WAIT_S

    def shorten(self, patience_s: float) -> None:
        """It lasts no longer than this from its beginning."""
        self._until_s = min(self._until_s, self._started_s + patience_s)

    async def wait(self, told_s: float | None) -> bool:
        """Sleep as long as the gateway said, or until it may be another now; False, at once, if patience ends before.

        A little longer than that, so that not all come back at once.
        """
        pause_s = (told_s or self._wait_s) * (1 + 0.25 * self._rng.random())
        if time.monotonic() + pause_s > self._until_s:
            return False
        await sleep(pause_s)
        self._wait_s = min(LONGEST_WAIT_S, 2 * self._wait_s)
        return True
