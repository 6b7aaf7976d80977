"""One thread that takes the items of all requests through the pool, and one stream for all of them.

A stream a request would cost a thread, and its items would never share a call with another's. Here items come from any
thread; the thread sleeps until one comes, one is cancelled or a call ends, and then moves everything on.
"""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from cluster.client import Client
from cluster.gateway.config import GatewayConfig
from cluster.streams.items import Item
from cluster.streams.outcomes import Outcome
from cluster.streams.stream import Stream
from cluster.streams.transport import Transport
from encoder.errors import EncodeError, EncoderPoolError, PoolClosedError
from workers.messages import EncodeBatch

logger = logging.getLogger(__name__)


class Dispatcher:
    """Takes items through a pool. `submit` and `cancel` may come from any thread."""

    def __init__(self, client: Client, config: GatewayConfig) -> None:
        """`client` keeps what it shares with its other streams, the quarantine above all."""
        self._transport = WakingTransport(client.transport)
        self.client = copy.copy(client)
        self.client.transport = self._transport
        self.client.config = client.config.model_copy(
            update={"items_per_call": config.items_per_call, "calls_per_worker": config.calls_per_worker}
        )
        self._stream = self._new_stream()
        self._inbox: deque[tuple[str, Sequence[Item]]] = deque()
        self._open: dict[Item, Callable[[Outcome], None]] = {}  # and who hears of its end
        self.success_s: float | None = None  # when something was last encoded
        self._ended: PoolClosedError | None = None
        self._closing = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._main, name="dispatch", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def submit(self, items: Sequence[Item]) -> None:
        """Open items; each `on_end` is called in the dispatcher's thread. Raises PoolClosedError."""
        self._put("add", items)

    def cancel(self, items: Sequence[Item]) -> None:
        """Nobody awaits these any more."""
        with suppress(PoolClosedError):  # then they have ended
            self._put("cancel", items)

    def close(self, timeout_s: float = 10.0) -> None:
        """End the thread; what is open fails."""
        self._closing = True
        self._transport.wake()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _put(self, what: str, items: Sequence[Item]) -> None:
        with self._lock:
            if self._ended is not None:
                raise PoolClosedError(str(self._ended))
            self._inbox.append((what, items))
        self._transport.wake()

    # --- the thread ----------------------------------------------------------------------------------------------

    def _main(self) -> None:
        error: PoolClosedError | None = None
        while error is None:
            try:
                self._run()
                error = PoolClosedError("the gateway is closed")
            except PoolClosedError as failure:
                error = failure
            except Exception as failure:  # edge of a thread, and others' items come after those that broke it
                logger.exception("the dispatcher begins anew")
                self._fail_all(EncodeError(f"the gateway failed: {type(failure).__name__}: {failure}"))
                self._stream = self._new_stream()
        with self._lock:
            self._ended = error
        self._take(adding=False)
        self._fail_all(error)

    def _new_stream(self) -> Stream:
        return Stream(self.client, sleep=self._transport.sleep)

    def _run(self) -> None:
        try:
            while not self._closing:
                self._transport.rest()
                self._take()
                if self._open:
                    self._stream.step(more=False, wait=not self._inbox)
                else:
                    self._transport.sleep(None)
        finally:
            self._stream.close()

    def _fail_all(self, error: EncoderPoolError) -> None:
        for item, on_end in self._open.items():
            on_end(Outcome(source=item.source, embedding=None, error=error))
        self._open.clear()

    def _take(self, *, adding: bool = True) -> None:
        """What came in since the last time."""
        while self._inbox:
            what, items = self._inbox.popleft()
            if what == "cancel":
                for item in items:
                    self._open.pop(item, None)
                if adding:
                    self._stream.cancel(items)
                continue
            for item in items:
                self._open[item] = item.on_end
                item.on_end = self._ender(item)
                if adding:
                    self._stream.add(item)

    def _ender(self, item: Item) -> Callable[[Outcome], None]:
        def end(outcome: Outcome) -> None:
            on_end = self._open.pop(item, None)
            if outcome.embedding is not None and not outcome.embedding.cached:  # a cache says nothing of the encoder
                self.success_s = time.monotonic()
            if on_end is not None:
                on_end(outcome)

        return end


class WakingTransport:
    """A transport whose waits also end when somebody calls `wake`. All else is `inner`'s."""

    def __init__(self, inner: Transport) -> None:
        """The calls that `inner` makes must be `RayCall`s."""
        self._inner = inner
        self._changed = threading.Condition()
        self._finished: set[Any] = set()
        self._is_awake = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def wake(self) -> None:
        """End the wait under way, or the next one, at once."""
        with self._changed:
            self._is_awake = True
            self._changed.notify_all()

    def rest(self) -> None:
        """From now on waits last again. Comes before a look at what the waker brought."""
        with self._changed:
            self._is_awake = False

    def sleep(self, timeout_s: float | None) -> None:
        """Wait for `wake`."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_awake, timeout_s)

    def start(self, worker_id: str, batch: EncodeBatch) -> Any:
        """See `Transport`."""
        call = self._inner.start(worker_id, batch)
        call.when_done(lambda: self._finish(call))
        return call

    def _finish(self, call: Any) -> None:
        with self._changed:
            self._finished.add(call)
            self._changed.notify_all()

    def wait(self, calls: Sequence[Any], timeout_s: float) -> list[Any]:
        """See `Transport`."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_awake or self._finished, timeout_s)
            done = [call for call in calls if call in self._finished]
            self._finished.clear()  # of others nobody waits any more
        return done
