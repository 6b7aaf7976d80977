"""How much a gateway takes at once, and from whom. Every refusal says when to come back."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from cluster.gateway.config import GatewayConfig
from encoder.errors import EncoderPoolError, PoolSaturatedError, RateLimitError

MAX_CALLERS = 10_000  # remembered; those with nothing under way are forgotten beyond it
RATE_WINDOW_S = 10.0
LONGEST_RETRY_S = 30


class Refused(Exception):
    """Not now. Carries the error and the seconds until it may work."""

    def __init__(self, error: EncoderPoolError, retry_after_s: float) -> None:
        super().__init__(str(error))
        self.error = error
        self.retry_after_s = min(LONGEST_RETRY_S, max(1, math.ceil(retry_after_s)))


@dataclass(slots=True)
class _Allowance:
    """What one caller has left."""

    num_requests: float  # that may come at once; grows with `requests_per_s`
    filled_s: float
    in_flight: int = 0


class CallerLimits:
    """Requests a second and requests at once, of each caller."""

    def __init__(self, config: GatewayConfig, now_s: Callable[[], float] = time.monotonic) -> None:
        self._rate = config.requests_per_s
        self._burst = max(1.0, config.requests_per_s or 0.0)
        self._max_in_flight = config.max_requests_in_flight
        self._now_s = now_s
        self._callers: dict[str, _Allowance] = {}

    @contextmanager
    def request(self, name: str) -> Iterator[None]:
        """One request of this caller. Raises Refused."""
        caller = self._allowance(name)
        if caller.in_flight >= self._max_in_flight:
            limit = f"{name} has {caller.in_flight} requests under way, the limit is {self._max_in_flight}"
            raise Refused(RateLimitError(f"{limit}; wait for one of them"), 1)
        if self._rate is not None:
            if caller.num_requests < 1:
                message = f"{name} asks more than {self._rate:g} times a second"
                raise Refused(RateLimitError(message), (1 - caller.num_requests) / self._rate)
            caller.num_requests -= 1
        caller.in_flight += 1
        try:
            yield
        finally:
            caller.in_flight -= 1

    def _allowance(self, name: str) -> _Allowance:
        now_s = self._now_s()
        caller = self._callers.get(name)
        if caller is None:
            if len(self._callers) >= MAX_CALLERS:
                self._callers = {other: what for other, what in self._callers.items() if what.in_flight}
            caller = self._callers[name] = _Allowance(self._burst, now_s)
        grown = caller.num_requests + (now_s - caller.filled_s) * (self._rate or 0.0)
        caller.num_requests = min(self._burst, grown)
        caller.filled_s = now_s
        return caller


class Room:
    """Bytes and items of all requests under way."""

    def __init__(self, config: GatewayConfig, now_s: Callable[[], float] = time.monotonic) -> None:
        self._max_items = config.max_open_items
        self._max_bytes = config.max_open_bytes
        self._now_s = now_s
        self._ends: deque[tuple[float, int]] = deque()  # when items ended lately, and how many
        self.num_items = 0
        self.num_bytes = 0
        self.num_requests = 0

    @contextmanager
    def request(self) -> Iterator[Share]:
        """A request's share, which grows as it is understood and returns at its end."""
        share = Share(self)
        self.num_requests += 1
        try:
            yield share
        finally:
            self.num_requests -= 1
            share.give_back()

    def check(self, share: Share, num_items: int, num_bytes: int) -> None:
        """Raises Refused when so much more does not fit beside what others have."""
        if self.num_items + num_items > self._max_items and self.num_items > share.num_items:
            what = f"{self.num_items} items are under way here and {self._max_items} are the limit"
        elif self.num_bytes + num_bytes > self._max_bytes and self.num_bytes > share.num_bytes:
            what = (
                f"{self.num_bytes / 2**20:.0f} MiB are under way here and {self._max_bytes / 2**20:.0f} are the limit"
            )
        else:
            return
        raise Refused(PoolSaturatedError(f"{what}; come back later"), self._clear_in_s())

    def note_end(self, num_items: int) -> None:
        """So many items were answered now."""
        now_s = self._now_s()
        if num_items:
            self._ends.append((now_s, num_items))
        while self._ends and self._ends[0][0] < now_s - RATE_WINDOW_S:
            self._ends.popleft()

    def _clear_in_s(self) -> float:
        """When half of what is under way will be done, at the rate of the last seconds."""
        since_s = self._now_s() - RATE_WINDOW_S
        per_s = sum(count for end_s, count in self._ends if end_s >= since_s) / RATE_WINDOW_S
        return 0.5 * self.num_items / per_s if per_s else LONGEST_RETRY_S / 6


class Share:
    """One request's part of the room."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self.caller = ""  # whose request it is
        self.num_items = 0
        self.num_bytes = 0

    def check(self, *, num_items: int = 0, num_bytes: int = 0) -> None:
        """Raises Refused when others fill the room so that this much more does not fit now."""
        self._room.check(self, num_items, num_bytes)

    def take(self, *, num_items: int = 0, num_bytes: int = 0) -> None:
        """Take more. Raises Refused when others fill the room."""
        self.check(num_items=num_items, num_bytes=num_bytes)
        self._room.num_items += num_items
        self._room.num_bytes += num_bytes
        self.num_items += num_items
        self.num_bytes += num_bytes

    def give_back(self) -> None:
        """All of it."""
        self._room.note_end(self.num_items)
        self._room.num_items -= self.num_items
        self._room.num_bytes -= self.num_bytes
        self.num_items = self.num_bytes = 0
