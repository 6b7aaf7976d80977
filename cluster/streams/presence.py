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

    def __init__(self, hello: Callable[[], None], *, interval_s: float, linger_s: float = 0.0) -> None:
        """`hello` returns at once, and raises PoolClosedError when there is nobody any more to say it to.

        It is said on until no stream was open for `linger_s`, and for an interval: the next one often follows at once.
        """
        self._hello = hello
        self._interval_s = interval_s
        self._linger_s = linger_s
        self._changed = threading.Condition()
        self._num_open = self._num_begun = 0
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """A stream opens."""
        with self._changed:
            self._num_open += 1
            self._num_begun += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="presence", daemon=True)
                self._thread.start()

    def end(self) -> None:
        """A stream closes."""
        with self._changed:
            self._num_open -= 1

    def _run(self) -> None:
        quiet_s, ends = 0.0, False
        while not ends:
            with self._changed:
                was_open, num_begun = self._num_open, self._num_begun
                self._changed.wait(self._interval_s)
                quiet_s = 0.0 if was_open or num_begun < self._num_begun else quiet_s + self._interval_s
                ends = quiet_s >= max(self._interval_s, self._linger_s)
                if ends:
                    self._thread = None
            try:
                self._hello()
            except PoolClosedError:
                ends = True
                with self._changed:
                    if self._thread is threading.current_thread():
                        self._thread = None
            except Exception:  # edge of a thread: without the next hello the pool would give us up
                logger.exception("could not tell the router that this client lives")
