"""`Gate`: who may still call Ray. What ends the connection shuts it, and waits for those inside."""

from __future__ import annotations

import threading
from collections.abc import Callable

from encoder.errors import PoolClosedError


class Gate:
    """Lets calls in until it is shut. A call made without Ray would start a Ray of its own, so none may be too late."""

    def __init__(self, *, connected: Callable[[], bool] = lambda: True) -> None:
        """`connected`: whether there is a connection that a call can take; somebody else may have ended it."""
        self._connected = connected
        self._changed = threading.Condition()
        self._num_inside = 0
        self.shut = False

    def __enter__(self) -> None:
        with self._changed:
            if self.shut:
                raise PoolClosedError("the pool is closed")
            if not self._connected():
                raise PoolClosedError("this process's connection to Ray was shut down, and with it its way to the pool")
            self._num_inside += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._num_inside -= 1
            self._changed.notify_all()

    def close(self) -> bool:
        """Let nobody in any more; whether this was the call that shut it."""
        with self._changed:
            was_open, self.shut = not self.shut, True
        return was_open

    def wait_empty(self, timeout_s: float) -> bool:
        """Wait until everybody has left."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._num_inside, timeout_s)
