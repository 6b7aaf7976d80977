"""`Calls`: those in progress, whose they are, and which nobody awaits any more: cancelled, or their client is gone."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence

from encoder.errors import EncodeError, PoolSaturatedError
from workers.job import Job
from workers.messages import EncodeBatch

REMEMBERED_S = 60.0  # calls of a client that is gone may queue for so long before they come here


class Calls:
    """Thread-safe. Jobs are failed outside its lock."""

    def __init__(self, *, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._lock = threading.Lock()
        self._calls: dict[str, tuple[str, Sequence[Job]]] = {}  # client and jobs by call id
        # Calls that may still come, and which items of them: `cancel` overtakes what queues.
        self._cancelled: deque[tuple[str, Sequence[int] | None]] = deque(maxlen=1024)
        self._gone_s: dict[str, float] = {}  # clients given up, and when

    def open(self, batch: EncodeBatch, jobs: Sequence[Job]) -> None:
        """A call begins; what of it nobody awaits fails at once."""
        with self._lock:
            self._calls[batch.call_id] = (batch.client, jobs)
            overtook = [numbers for call_id, numbers in self._cancelled if call_id == batch.call_id]
            is_gone = batch.client in self._gone_s
        for numbers in overtook:
            self.cancel(batch.call_id, numbers)
        if is_gone:
            _give_up(jobs)

    def close(self, batch: EncodeBatch) -> None:
        """A call ends."""
        with self._lock:
            del self._calls[batch.call_id]

    def cancel(self, call_id: str, numbers: Sequence[int] | None = None) -> None:
        """Drop what a call, or only these items of it, still has in the queue; the items fail."""
        with self._lock:
            _, jobs = self._calls.get(call_id, ("", ()))
            if not jobs:
                self._cancelled.append((call_id, numbers))
        for number, job in enumerate(jobs):
            if numbers is None or number in numbers:
                job.fail(EncodeError("its caller cancelled it"))

    def clients(self) -> list[str]:
        """Whose calls are here, or were when they were given up."""
        now_s = self._now_s()
        with self._lock:
            self._gone_s = {client: gone_s for client, gone_s in self._gone_s.items() if now_s - gone_s < REMEMBERED_S}
            return [*{client for client, _ in self._calls.values() if client}.union(self._gone_s)]

    def give_up(self, silent: Collection[str]) -> None:
        """Of `clients()`, these are gone: drop what is here of them, and what may still come. The others live."""
        now_s = self._now_s()
        with self._lock:
            self._gone_s = {client: self._gone_s.get(client, now_s) for client in silent}
            left = [job for client, jobs in self._calls.values() if client in self._gone_s for job in jobs]
        _give_up(left)


def _give_up(jobs: Sequence[Job]) -> None:
    for job in jobs:
        # A client that was only slow, and lives, comes back with it.
        job.fail(PoolSaturatedError("its client was not heard of for too long; retry in 1000 ms"))
