"""The worker's bounded queue: items at the door in predicted milliseconds and bytes, segments out to the GPU thread.

Items are admitted or refused before they are decoded. They wait for a thread that decodes them, then their segments
wait for the GPU, both times in the order that priority.py gives. The next replay is formed when the GPU thread asks
for it, out of whatever waits then, without a timer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from encoder.adapters.base import Segment
from encoder.errors import DeadlineError, EncoderPoolError, PoolClosedError, PoolSaturatedError
from encoder.packing import LOOK_AHEAD, Replay
from encoder.types import SegmentShape
from workers.admission import GUARANTEED, Load, wait_ms
from workers.job import Job
from workers.priority import Line, Priority, rank_s

Plan = Callable[[Sequence[SegmentShape]], Replay]
MIB = 2**20


@dataclass(frozen=True, slots=True, eq=False)
class _InLine:
    """What waits in the place of its item."""

    job: Job

    @property
    def priority(self) -> Priority:
        return self.job.priority

    @property
    def rank_s(self) -> float:
        return self.job.rank_s


@dataclass(frozen=True, slots=True, eq=False)
class Undecoded(_InLine):
    """An admitted item that waits for a decoding thread."""

    decode: Callable[[], None]


@dataclass(frozen=True, slots=True, eq=False)
class Waiting(_InLine):
    """One segment in the queue."""

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
        self,
        *,
        max_queue_ms: float,
        max_ready_patches: int,
        max_queue_bytes: int = 2**62,
        batch_patience_s: float = 5.0,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limit = Load(max_queue_ms, max_queue_bytes)
        self.max_ready_patches = max_ready_patches
        self.batch_patience_s = batch_patience_s
        self._now_s = now_s
        # One lock; a thread sleeps on what concerns it, or every item would wake all of them.
        self._lock = threading.Lock()
        self._decodable = threading.Condition(self._lock)  # the decoding threads: something to decode, or room
        self._runnable = threading.Condition(self._lock)  # the GPU thread: a segment
        self._freed = threading.Condition(self._lock)  # a clip's next part, and `wait_empty`: room, or a settled item
        self._undecoded: Line[Undecoded] = Line()
        self._waiting: Line[Waiting] = Line()
        self._ready_patches = dict.fromkeys(Priority, 0)
        self._ready_bytes = dict.fromkeys(Priority, 0)
        self._admitted: dict[Priority, dict[Job, None]] = {priority: {} for priority in Priority}
        self._loads = dict.fromkeys(Priority, Load(0.0, 0))  # of the items admitted, as they came
        self._closed: EncoderPoolError | None = None  # why nothing is admitted any more
        self._awoken = False
        self.aborted = False

    @property
    def backlog_ms(self) -> float:
        """Predicted work admitted and not settled."""
        return sum(load.ms for load in self._loads.values())

    @property
    def backlog_bytes(self) -> int:
        """What the items admitted and not settled came as, and the patches of them that wait."""
        return sum(load.num_bytes for load in self._loads.values()) + sum(self._ready_bytes.values())

    @property
    def num_waiting(self) -> int:
        """Segments decoded and not taken."""
        return len(self._waiting)

    @property
    def num_admitted(self) -> int:
        """Items admitted and not settled."""
        return sum(len(jobs) for jobs in self._admitted.values())

    def admit(self, job: Job) -> None:
        """Take responsibility for an item, or refuse it: PoolSaturatedError, or PoolClosedError once closed.

        See `workers.admission` for what fits. One that was settled on its way here takes no room.
        """
        with self._lock:
            if self._closed is not None:
                raise self._closed
            if job.settled:  # and released: nobody would release it again
                return
            total = Load(self.backlog_ms, self.backlog_bytes)
            load = self._loads[job.priority]
            own = load + Load(0.0, self._ready_bytes[job.priority])
            retry_ms = wait_ms(job.load, total=total, own=own, limit=self.limit)
            if retry_ms > 0:
                raise PoolSaturatedError(self._refusal(total, job, retry_ms))
            job.rank_s = rank_s(job.priority, self._now_s(), self.batch_patience_s)
            self._admitted[job.priority][job] = None
            self._loads[job.priority] = load + job.load

    def _refusal(self, total: Load, job: Job, retry_ms: float) -> str:
        if total.ms + job.cost_ms > self.limit.ms:
            return (
                f"the worker's queue holds {total.ms:.0f} ms of work and takes "
                f"{self.limit.ms:.0f}; retry in {retry_ms:.0f} ms"
            )
        return (
            f"the worker's queue holds {total.num_bytes / MIB:.1f} MiB and takes "
            f"{self.limit.num_bytes / MIB:.1f}; retry in {retry_ms:.0f} ms"
        )

    def release(self, job: Job) -> None:
        """Forget an item that is settled."""
        with self._lock:
            jobs = self._admitted[job.priority]
            if job in jobs:
                del jobs[job]
                # Nothing left is no backlog: without this, rounding errors would add up.
                self._loads[job.priority] = self._loads[job.priority] - job.load if jobs else Load(0.0, 0)
            self._freed.notify_all()

    # --- to be decoded -------------------------------------------------------------------------------------------

    def decode_later(self, job: Job, decode: Callable[[], None]) -> None:
        """Queue an admitted item's decoding, which ends in `push` or in the job's failure."""
        with self._lock:
            if not self.aborted:
                self._undecoded.append(Undecoded(job, decode))
                self._decodable.notify()

    def next_decode(self) -> Callable[[], None] | None:
        """What to decode next, as soon as there is something and room for it; None once aborted.

        Decoding pauses while too much decoded work waits; a quarter of the room is each priority's own.
        """
        with self._lock:
            while not self.aborted:
                entry = self._undecoded.pop([priority for priority in Priority if self._has_room(priority)])
                if entry is None:
                    self._decodable.wait()
                elif not entry.job.settled:
                    return entry.decode
            return None

    def _has_room(self, priority: Priority) -> bool:
        return (
            sum(self._ready_patches.values()) < self.max_ready_patches
            or self._ready_patches[priority] < GUARANTEED * self.max_ready_patches
        )

    def push(self, job: Job, segments: Sequence[Segment], *, first: int = 0, num_segments: int | None = None) -> None:
        """Queue an admitted item's segments for the GPU.

        An item may come in parts: `first` counts the segments of the parts before this one, `num_segments` those of
        the whole item. All but the first part wait here for room: the decoding of a long clip pauses.
        """
        with self._lock:
            if first:
                self._freed.wait_for(lambda: job.settled or self.aborted or self._has_room(job.priority))
            if job.settled or self.aborted:
                return
            if first == 0:
                job.ready_s = self._now_s()
                job.expect(num_segments or len(segments))
            for index, segment in enumerate(segments, first):
                waiting = Waiting(job, index, segment)
                self._waiting.append(waiting)
                self._weigh(waiting, 1)
            self._runnable.notify()

    def _weigh(self, waiting: Waiting, sign: int) -> None:
        """Count a segment that comes (1) or leaves (-1). One that leaves makes room for more to be decoded."""
        self._ready_patches[waiting.priority] += sign * waiting.segment.shape.num_patches
        self._ready_bytes[waiting.priority] += sign * waiting.segment.patches_PC.nbytes

    def _tell_of_room(self) -> None:
        if len(self._undecoded):
            self._decodable.notify_all()
        self._freed.notify_all()

    # --- to be run -----------------------------------------------------------------------------------------------

    def take(self, plan: Plan, *, wait_s: float) -> Batch | None:
        """The next replay, as `plan` forms it from what waits; None when nothing came within `wait_s`, or on `wake`."""
        with self._lock:
            if wait_s > 0:
                self._runnable.wait_for(lambda: len(self._waiting) or self._awoken or self.aborted, timeout=wait_s)
                self._awoken = False
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
        with self._lock:
            self._waiting.put_back([waiting for index, waiting in enumerate(window) if index not in taken])
            for entry in entries:
                self._weigh(entry, -1)
            self._tell_of_room()
        return Batch(replay, entries)

    def wake(self) -> None:
        """End the wait of `take`: there is something else to do."""
        with self._lock:
            self._awoken = True
            self._runnable.notify()

    def _pop_window(self) -> tuple[list[Waiting], list[Job]]:
        """The first segments that somebody awaits, and the jobs past their deadline; the rest of the head is gone."""
        now_s = self._now_s()
        window: list[Waiting] = []
        expired: dict[Job, None] = {}
        while len(window) < LOOK_AHEAD:
            waiting = self._waiting.pop()
            if waiting is None:
                break
            job = waiting.job
            if job.deadline_s is not None and now_s >= job.deadline_s:
                expired[job] = None
            if job.settled or job in expired:
                self._weigh(waiting, -1)
                self._tell_of_room()
            else:
                window.append(waiting)
        return window, list(expired)

    def close(self) -> None:
        """Admit nothing more; what is admitted goes on."""
        with self._lock:
            self._closed = self._closed or PoolClosedError("the worker is draining")

    def abort(self, error: EncoderPoolError) -> None:
        """Close, and settle everything that is left with this error."""
        with self._lock:
            self._closed = error
            self.aborted = True
            left = [job for jobs in self._admitted.values() for job in jobs]
            self._undecoded.clear()
            self._waiting.clear()
            self._ready_patches = dict.fromkeys(Priority, 0)
            self._ready_bytes = dict.fromkeys(Priority, 0)
            for threads in (self._decodable, self._runnable, self._freed):
                threads.notify_all()
        for job in left:
            job.fail(error)

    def wait_empty(self, timeout_s: float) -> bool:
        """Wait until every admitted item is settled."""
        with self._lock:
            return self._freed.wait_for(lambda: not self.num_admitted, timeout=timeout_s)
