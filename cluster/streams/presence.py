"""`Presence`: lets the router know that a client lives while it has items under way.

A client that is killed falls silent. Then its leases end, and workers drop what they hold of it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from encoder.errors import PoolClosedError

logger = logging.getLogger(__name__)


class Presence:
    """Says hello now and then, on a thread of its own, as long as a stream is open. Thread-safe."""

    def __init__(self, hello: Callable[[], None], *, interval_s: float) -> None:
        """`hello` returns at once, and raises PoolClosedError when there is nobody any more to say it to."""
        self._hello = hello
        self._interval_s = interval_s
        self._changed = threading.Condition()
        self._num_open = 0
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """A stream opens."""
        with self._changed:
            self._num_open += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="presence", daemon=True)
                self._thread.start()

    def end(self) -> None:
        """A stream closes."""
        with self._changed:
            self._num_open -= 1

    def _run(self) -> None:
        while True:
            with self._changed:
                # Once more after the last stream: the next one often follows at once.
                idle = not self._num_open
                self._changed.wait(self._interval_s)
                if idle and not self._num_open:
                    self._thread = None
                    return
            try:
                self._hello()
            except PoolClosedError:
                with self._changed:
                    self._thread = None
                return
            except Exception:  # edge of a thread: without the next hello the pool would give us up
                logger.exception("could not tell the router that this client lives")
