"""What an actor settles first in a process of its own: devices, logs, traces, memory. Before torch is imported."""

from __future__ import annotations

import ctypes
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress

from workers import spans

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # options of mallopt(3)
LARGEST_KEPT_BYTES = 1 << 25
MOST_KEPT_BYTES = 1 << 28
QUIET_S = 10.0  # pages of pictures that come later are taken anew: once, not for each


def set_up_process(service: str, *, on_gpu: bool = False) -> None:
    """`service` is the name under which its spans are collected; `ENCPOOL_LOG_LEVEL` says what it logs."""
    if not on_gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # Ray leaves all of them visible to an actor that asked for none
    level = os.environ.get("ENCPOOL_LOG_LEVEL", "WARNING").upper()
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s")
    spans.set_up(service)


def keep_freed_memory() -> None:
    """Let malloc keep what pictures leave for the next ones, up to 32 MiB each. Only glibc can.

    Else pages of each picture come from the system, which zeroes them one by one while other threads wait for its
    lock, and some of them for Python's: it is held where Pillow makes room for a picture.

    Each thread keeps about what it once had at a time: 16 threads kept 2.6 GB after photos with a picture of 80
    megapixels now and then, 9 GB after such pictures alone. `FreedMemory` ends that.
    """
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, LARGEST_KEPT_BYTES)
        mallopt(_M_TRIM_THRESHOLD, MOST_KEPT_BYTES)


class FreedMemory:
    """What malloc keeps goes back to the system once a worker has had nothing to do for a while."""

    def __init__(self, *, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._num_items = 0
        self._quiet_since_s: float | None = None  # None: given back

    def look(self, num_items: int) -> None:
        """To be called now and then with the number of items so far."""
        if num_items != self._num_items:
            self._num_items, self._quiet_since_s = num_items, self._now_s()
        elif self._quiet_since_s is not None and self._now_s() - self._quiet_since_s >= QUIET_S:
            self._quiet_since_s = None
            with suppress(OSError, AttributeError):
                ctypes.CDLL(None).malloc_trim(0)  # Python's lock is free meanwhile
