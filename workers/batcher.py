"""The worker's bounded queue: items at the door in predicted milliseconds, segments out to the GPU thread.

Items are admitted or refused before they are decoded. Their segments wait in the order in which they were decoded,
and the next replay is formed when the GPU thread asks for it, out of whatever waits then, without a timer.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from encoder.adapters.base import Segment
from encoder.errors import DeadlineError, EncoderPoolError, PoolClosedError, PoolSaturatedError
from encoder.packing import LOOK_AHEAD, Replay
from encoder.types import SegmentShape

if TYPE_CHECKING:
    import torch

Plan = Callable[[Sequence[SegmentShape]], Replay]


class Job:
    """One item inside a worker. Settled exactly once: by its last segment, or by the first error to reach it."""

    def __init__(self, *, cost_ms: float, deadline_s: float | None = None) -> None:
        self.cost_ms = cost_ms
        self.deadline_s = deadline_s  # on the batcher's clock
        self.on_settled: Callable[[Job], None] = lambda job: None
        self.error: EncoderPoolError | None = None
        self.outputs: list[torch.Tensor | None] = []  # one a segment
        self.graphs: dict[str, None] = {}  # in order of use
        self.misses: dict[str, None] = {}
        self.timings_ms: dict[str, float] = {}
        self.cached = False  # its tokens were computed for another: from the cache, or of an identical item
        self.ready_s = 0.0
        self.started_s: float | None = None
        self._lock = threading.Lock()
        self._num_missing = 0
        self._settled = threading.Event()

    @property
    def settled(self) -> bool:
        return self._settled.is_set()

    def wait(self) -> None:
        """Block until settled."""
        self._settled.wait()

    def expect(self, num_segments: int) -> None:
        """Say how many segments it has, before the first of them may run."""
        self.outputs = [None] * num_segments
        self._num_missing = num_segments

    def deliver(self, index: int, tokens_TE: torch.Tensor) -> None:
        """Keep the output of one segment; the last one settles the job."""
        with self._lock:
            if self.settled:
                return
            assert self.outputs[index] is None, "a segment ran twice"
            self.outputs[index] = tokens_TE
            self._num_missing -= 1
            if self._num_missing:
                return
            self._settled.set()
        self.on_settled(self)

    def complete(self, outputs: Sequence[torch.Tensor | None]) -> None:
        """Settle with all of the item's rows at once, unless settled already."""
        with self._lock:
            if self.settled:
                return
            self.outputs = list(outputs)
            self._settled.set()
        self.on_settled(self)

    def fail(self, error: EncoderPoolError) -> None:
        """Settle with an error, unless settled already."""
        with self._lock:
            if self.settled:
                return
            self.error = error
            self.outputs = []
            self._settled.set()
        self.on_settled(self)


@dataclass(frozen=True, slots=True, eq=False)
class Waiting:
    """One segment in the queue."""

    job: Job
    index: int  # among the segments of its item
    segment: Segment


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Segments that run together."""

    replay: Replay
    entries: tuple[Waiting, ...]


class Batcher:
    """Thread-safe. Any thread admits and pushes; one thread, the GPU's, takes."""

    def __init__(
        self, *, max_queue_ms: float, max_ready_patches: int, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self.max_queue_ms = max_queue_ms
        self.max_ready_patches = max_ready_patches
        self._now_s = now_s
        self._changed = threading.Condition()
        self._waiting: deque[Waiting] = deque()
        self._ready_patches = 0
        self._admitted: dict[Job, None] = {}
        self._backlog_ms = 0.0
        self._closed: EncoderPoolError | None = None  # why nothing is admitted any more
        self.aborted = False

    @property
    def backlog_ms(self) -> float:
        """Predicted work admitted and not settled."""
        return self._backlog_ms

    @property
    def num_waiting(self) -> int:
        """Segments decoded and not taken."""
        return len(self._waiting)

    @property
    def num_admitted(self) -> int:
        """Items admitted and not settled."""
        return len(self._admitted)

    def admit(self, job: Job) -> None:
        """Take responsibility for an item, or refuse it: PoolSaturatedError, or PoolClosedError once closed.

        An empty queue takes an item of any cost, so that none is refused for ever.
        """
        with self._changed:
            if self._closed is not None:
                raise self._closed
            over_ms = self._backlog_ms + job.cost_ms - self.max_queue_ms
            if self._admitted and over_ms > 0:
                raise PoolSaturatedError(
                    f"the worker's queue holds {self._backlog_ms:.0f} ms of work and takes "
                    f"{self.max_queue_ms:.0f}; retry in {over_ms:.0f} ms"
                )
            self._admitted[job] = None
            self._backlog_ms += job.cost_ms

    def release(self, job: Job) -> None:
        """Forget an item that is settled."""
        with self._changed:
            if job in self._admitted:
                del self._admitted[job]
                # An empty queue has no backlog: without this, rounding errors would add up.
                self._backlog_ms = self._backlog_ms - job.cost_ms if self._admitted else 0.0
            self._changed.notify_all()

    def push(self, job: Job, segments: Sequence[Segment]) -> None:
        """Queue an admitted item's segments. Blocks while too much decoded work waits: decoding then pauses."""
        with self._changed:
            self._changed.wait_for(lambda: job.settled or self._ready_patches < self.max_ready_patches)
            if job.settled:
                return
            job.ready_s = self._now_s()
            job.expect(len(segments))
            self._waiting.extend(Waiting(job, index, segment) for index, segment in enumerate(segments))
            self._ready_patches += sum(segment.shape.num_patches for segment in segments)
            self._changed.notify_all()

    def take(self, plan: Plan, *, wait_s: float) -> Batch | None:
        """The next replay, as `plan` forms it from what waits, or None when nothing came within `wait_s`."""
        with self._changed:
            if wait_s > 0:
                self._changed.wait_for(lambda: self._waiting or self.aborted, timeout=wait_s)
            window, expired = self._pop_window()
        for job in expired:
            job.fail(DeadlineError("its deadline passed while it waited in the worker's queue"))
        if not window:
            return None
        # Planned outside the lock: nobody else removes, others append behind the window.
        replay = plan([waiting.segment.shape for waiting in window])
        assert replay.taken, "a plan takes at least one segment"
        taken = set(replay.taken)
        entries = tuple(window[index] for index in replay.taken)
        with self._changed:
            self._waiting.extendleft(window[index] for index in reversed(range(len(window))) if index not in taken)
            self._ready_patches -= sum(entry.segment.shape.num_patches for entry in entries)
            self._changed.notify_all()
        return Batch(replay, entries)

    def _pop_window(self) -> tuple[list[Waiting], list[Job]]:
        """The oldest segments that somebody awaits, and the jobs past their deadline; the rest of the head is gone."""
        now_s = self._now_s()
        window: list[Waiting] = []
        expired: dict[Job, None] = {}
        while self._waiting and len(window) < LOOK_AHEAD:
            waiting = self._waiting.popleft()
            job = waiting.job
            if job.deadline_s is not None and now_s >= job.deadline_s:
                expired[job] = None
            if job.settled or job in expired:
                self._ready_patches -= waiting.segment.shape.num_patches
                self._changed.notify_all()
            else:
                window.append(waiting)
        return window, list(expired)

    def close(self, reason: str = "the worker is draining") -> None:
        """Admit nothing more; what is admitted goes on."""
        with self._changed:
            self._closed = PoolClosedError(reason)
            self._changed.notify_all()

    def abort(self, error: EncoderPoolError) -> None:
        """Close, and settle everything that is left with this error."""
        with self._changed:
            self._closed = error
            self.aborted = True
            left = list(self._admitted)
            self._waiting.clear()
            self._ready_patches = 0
            self._changed.notify_all()
        for job in left:
            job.fail(error)

    def wait_empty(self, timeout_s: float) -> bool:
        """Wait until every admitted item is settled."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._admitted, timeout=timeout_s)
