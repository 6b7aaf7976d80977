"""SIGTERM, answered as Ctrl-C is: what was begun is cleaned up, and the exit status says that it was interrupted."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Let SIGTERM do what Ctrl-C does. In the main thread; in another one this changes nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def keeping_sigterm() -> Iterator[None]:
    """Give SIGTERM back to the handler that the program has, if it has one: `ray.init` puts its own in the place."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread() and callable(before):
            signal.signal(signal.SIGTERM, before)
