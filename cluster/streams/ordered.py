"""`encode_many`: reads ahead of its caller within bounds, and hands outcomes out in the order of the sources."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable
from functools import partial

from cluster.streams.items import Item
from cluster.streams.outcomes import Outcome
from cluster.streams.session import Session
from cluster.streams.sources import Source
from cluster.streams.stream import Stream
from encoder.errors import EncoderPoolError, PoolClosedError
from workers.priority import Priority

READ_SLICE_S = 0.02  # reading pauses this often to look after calls


def encode_in_order(
    session: Session, sources: Iterable[Source], *, timeout_s: float | None, priority: Priority, scope: str | None = ""
) -> Generator[Outcome, None, None]:
    """Outcomes in the order of the sources. All work is done in the caller's thread, whenever it asks for the next."""
    ordered = _Ordered(session, sources, timeout_s, priority, scope)
    try:
        yield from ordered.outcomes()
    finally:
        ordered.stream.close()


class _Ordered:
    """What was read, what is done, and what was handed out."""

    def __init__(
        self,
        session: Session,
        sources: Iterable[Source],
        timeout_s: float | None,
        priority: Priority,
        scope: str | None,
    ) -> None:
        self.stream = Stream(session)
        self._session = session
        self._config = session.config
        self._sources = enumerate(sources)
        self._timeout_s = timeout_s
        self._priority = priority
        self._scope = scope
        self._exhausted = False
        self._broken: Exception | None = None  # what the caller's iterator raised
        self._num_read = 0
        self._next_out = 0
        self._done: dict[int, Outcome] = {}

    def outcomes(self) -> Generator[Outcome, None, None]:
        while True:
            self._read()
            more = self._has_room()
            awaited = self._next_out < self._num_read and self._next_out not in self._done
            self.stream.step(more=more, wait=awaited and not more)
            for _ in range(self._config.items_per_call):  # then the workers want to be looked after again
                outcome = self._done.pop(self._next_out, None)
                if outcome is None:
                    break
                self._next_out += 1
                given_s = time.monotonic()
                yield outcome
                self.stream.excuse(time.monotonic() - given_s)
            if self._exhausted and self._next_out == self._num_read:
                if self._broken is not None:
                    raise self._broken
                return
            if self._session.closed:
                raise PoolClosedError("the pool was closed while items were under way")

    def _has_room(self) -> bool:
        return (
            not self._exhausted
            and self._num_read - self._next_out < self._config.window(self._session.num_workers())
            and self.stream.open_bytes < self._config.max_in_flight_bytes
        )

    def _read(self) -> None:
        started_s = time.monotonic()
        while self._has_room() and time.monotonic() - started_s < READ_SLICE_S:
            try:
                index, source = next(self._sources)
            except StopIteration:
                self._exhausted = True
                return
            except Exception as error:  # the caller's own; what was read before it comes out first
                self._exhausted, self._broken = True, error
                return
            self._num_read += 1
            read_s = time.monotonic()
            try:
                encoded, header, shape = self._session.read(source)
            except EncoderPoolError as error:
                self._done[index] = Outcome(source=source, embedding=None, error=error)
                continue
            self.stream.add(
                Item(
                    source=source,
                    encoded=encoded,
                    shape=shape,
                    note=header.note,
                    read_s=read_s,
                    timeout_s=self._timeout_s,
                    priority=self._priority,
                    scope=self._scope,
                    on_end=partial(self._done.__setitem__, index),
                )
            )
