"""`Flights`: what a worker with a cache does before it encodes. Kept items are answered, identical ones run once.

An item in progress is a *flight*: one job that is admitted, decoded and run, and the callers' jobs that wait for it.
A caller that gives up, or whose deadline passes, leaves; the flight goes on for the others and ends with the last.
"""

# Shapes: T rows of an item, E width of a token.

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from encoder.errors import DeadlineError, EncodeError
from encoder.types import ItemShape
from workers.cache import CacheStats, EmbeddingCache
from workers.job import Job

logger = logging.getLogger(__name__)

Begin = Callable[[Job], None]
"""Admits and decodes a job, or fails it."""


@dataclass(slots=True, eq=False)
class Flight:
    """One item in progress, and who waits for it."""

    key: bytes
    shape: ItemShape
    work: Job
    waiters: dict[Job, Begin] = field(default_factory=dict)

    def set_deadline(self) -> None:
        """Run as late as the most patient waiter allows."""
        deadlines = [job.deadline_s for job in self.waiters]
        limited = [deadline_s for deadline_s in deadlines if deadline_s is not None]
        self.work.deadline_s = max(limited) if limited and len(limited) == len(deadlines) else None


class Flights:
    """Thread-safe. Jobs are settled, and work begins, outside its lock."""

    def __init__(
        self,
        cache: EmbeddingCache,
        *,
        release: Callable[[Job], None] = lambda work: None,
        later: Callable[[Callable[[], None]], object] = lambda task: task(),
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`release` hears of work that is settled; `later` does what takes milliseconds on another thread."""
        self.cache = cache
        self._release = release
        self._later = later
        self._now_s = now_s
        self._lock = threading.Lock()
        self._flights: dict[bytes, Flight] = {}
        self._num_joins = 0

    def stats(self) -> CacheStats:
        """The cache's counts, items that joined others told apart."""
        return self.cache.stats(joins=self._num_joins)

    def enter(self, key: bytes, shape: ItemShape, waiter: Job, begin: Begin) -> None:
        """Settle the job from the cache, or let it wait for an identical one in progress, or `begin` its own work.

        The tokens that a job gets are shared with others: its answer must be a copy.
        """
        opened = False
        with self._lock:
            kept_TE = self.cache.get(key, shape)  # under the lock: a flight ends only once its tokens are kept
            flight = None
            if kept_TE is None:
                flight = self._flights.get(key)
                if flight is None or flight.shape != shape:  # another shape: it runs apart, and one of them will fail
                    flight, opened = self._open(key, shape, waiter), True
                else:
                    self._num_joins += 1
                waiter.cached = not opened
                flight.waiters[waiter] = begin
                flight.set_deadline()
        if flight is None:
            assert kept_TE is not None
            waiter.cached = True
            waiter.complete([kept_TE])
            return
        if waiter.settled:  # it was cancelled, and when it left there was nothing to leave
            self.leave(key, waiter)
        if opened:
            begin(flight.work)
        elif flight.work.settled:  # and perhaps it has looked for those who wait already
            self._land(flight)

    def leave(self, key: bytes, waiter: Job) -> None:
        """The job was settled by others than its flight. Work that nobody awaits any more ends."""
        with self._lock:
            flight = self._flights.get(key)
            if flight is None or flight.waiters.pop(waiter, None) is None:
                return
            if flight.waiters:
                flight.set_deadline()
                return
            if flight.work.settled:
                return
            del self._flights[key]  # who comes now starts anew
        flight.work.fail(EncodeError("nobody awaits it any more"))

    def _open(self, key: bytes, shape: ItemShape, waiter: Job) -> Flight:
        flight = Flight(
            key, shape, work=Job(cost_ms=waiter.cost_ms, num_bytes=waiter.num_bytes, priority=waiter.priority)
        )
        flight.work.on_settled = lambda work: self._settle(flight)
        self._flights.setdefault(key, flight)
        return flight

    def _settle(self, flight: Flight) -> None:
        self._release(flight.work)
        if flight.work.error is None:
            self._land(flight)
            self._later(lambda: self._keep(flight))
        else:
            self._close(flight)
            self._land(flight)

    def _keep(self, flight: Flight) -> None:
        """Copy the tokens into the cache, then end the flight."""
        blocks = [block for block in flight.work.outputs if block is not None]
        spent_ms = flight.work.cost_ms + flight.work.timings_ms.get("decode", 0.0)
        try:
            self.cache.put(flight.key, torch.cat(blocks), flight.shape, cost_ms=spent_ms)
        except Exception:  # edge of a thread: who has waited has the tokens, who comes later computes them again
            logger.exception("could not keep an item of %d tokens", flight.shape.num_tokens)
        finally:
            self._close(flight)

    def _close(self, flight: Flight) -> None:
        with self._lock:
            if self._flights.get(flight.key) is flight:
                del self._flights[flight.key]

    def _land(self, flight: Flight) -> None:
        """Settle everyone who waits as the work was."""
        with self._lock:
            waiters, flight.waiters = flight.waiters, {}
        work = flight.work
        for waiter, begin in waiters.items():
            if isinstance(work.error, DeadlineError) and not self._overdue(waiter, self._now_s()):
                self.enter(flight.key, flight.shape, waiter, begin)  # it joined when the work was just given up
            elif work.error is not None:
                waiter.fail(work.error)
            elif work.started_s is not None and self._overdue(waiter, work.started_s):
                waiter.fail(DeadlineError("its deadline passed while it waited for an identical item"))
            else:
                self._hand_over(work, waiter)

    @staticmethod
    def _overdue(waiter: Job, now_s: float) -> bool:
        return waiter.deadline_s is not None and now_s >= waiter.deadline_s

    @staticmethod
    def _hand_over(work: Job, waiter: Job) -> None:
        if not waiter.cached:  # the one for whom it ran
            waiter.graphs, waiter.misses = work.graphs, work.misses
            waiter.timings_ms |= work.timings_ms
            waiter.started_s = work.started_s
        waiter.complete(work.outputs)
