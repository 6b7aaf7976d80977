"""`Tracer`: keeps what became of each item while a trace of the pool's traffic is recorded."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from workers.job import Job
from workers.messages import EncodeItem, TracedItem

MAX_TRACED = 10_000  # items kept between two beats; older ones are lost


class Tracer:
    """Any thread notes items, one takes them."""

    def __init__(self) -> None:
        self.is_on = False
        self._items: deque[TracedItem] = deque(maxlen=MAX_TRACED)

    def note(self, jobs: Sequence[Job], items: Sequence[EncodeItem], model: str) -> None:
        """Keep those items of a call that were encoded; what failed or came from a cache is left out."""
        if not self.is_on:
            return
        now_s = time.time()
        for job, item in zip(jobs, items, strict=True):
            if job.error is None and not job.cached:
                self._items.append(
                    TracedItem(
                        time_s=now_s,
                        model=model,
                        grids=item.shape.grids,
                        graphs=tuple(job.graphs),
                        misses=tuple(job.misses),
                        ms=job.timings_ms.get("replay", 0.0),
                    )
                )

    def take(self) -> tuple[TracedItem, ...]:
        """What was noted since the last time."""
        return tuple(self._items.popleft() for _ in range(len(self._items)))
