"""What happened lately, for the live page: errors, and how long requests took."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

NUM_ERRORS = 50
WINDOW_S = 60.0
MAX_REQUESTS = 20_000
MAX_MESSAGE = 500  # letters


class Recent:
    """Remembers the last errors and the requests of the last minute. Belongs to the event loop."""

    def __init__(self, now_s: Callable[[], float] = time.time) -> None:
        self._now_s = now_s
        self._errors: deque[dict[str, Any]] = deque(maxlen=NUM_ERRORS)
        self._requests: deque[tuple[float, float, int]] = deque(maxlen=MAX_REQUESTS)  # when, seconds, items

    def note(self, status: int, kind: str, message: str) -> None:
        """An item or a request failed. Equal ones in a row are one, with a count."""
        now_s, message = self._now_s(), message[:MAX_MESSAGE]
        last = self._errors[0] if self._errors else None
        if last is not None and (last["status"], last["type"], last["message"]) == (status, kind, message):
            last["count"] += 1
            last["time_s"] = now_s
        else:
            entry = {"time_s": now_s, "status": status, "type": kind, "message": message, "count": 1}
            self._errors.appendleft(entry)

    def answer(self, seconds: float, num_items: int) -> None:
        """A request was answered."""
        self._requests.append((self._now_s(), seconds, num_items))

    @property
    def errors(self) -> list[dict[str, Any]]:
        """The newest first."""
        return list(self._errors)

    def requests(self) -> dict[str, float | int | None]:
        """Counts and percentiles of the last minute."""
        since_s = self._now_s() - WINDOW_S
        while self._requests and self._requests[0][0] < since_s:
            self._requests.popleft()
        taken_ms = sorted(seconds * 1e3 for _, seconds, _ in self._requests)
        return {
            "window_s": WINDOW_S,
            "num_requests": len(taken_ms),
            "num_items": sum(num_items for _, _, num_items in self._requests),
            **{f"p{percent}_ms": percentile(taken_ms, percent) for percent in (50, 90, 99)},
        }


def percentile(ordered: Sequence[float], percent: int) -> float | None:
    """The value that so many percent do not exceed; None of nothing."""
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)] if ordered else None
