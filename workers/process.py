"""What an actor settles first in a process of its own: devices, logs, traces, memory. Before torch is imported."""

from __future__ import annotations

import ctypes
import logging
import os
from contextlib import suppress

from workers import spans

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # options of mallopt(3)
LARGEST_KEPT_BYTES = 1 << 25
MOST_KEPT_BYTES = 1 << 28


def set_up_process(service: str, *, on_gpu: bool = False) -> None:
    """`service` is the name under which its spans are collected; `ENCPOOL_LOG_LEVEL` says what it logs."""
    if not on_gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # Ray leaves all of them visible to an actor that asked for none
    level = os.environ.get("ENCPOOL_LOG_LEVEL", "WARNING").upper()
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s")
    spans.set_up(service)


def keep_freed_memory() -> None:
    """Let malloc keep what pictures leave for the next ones, up to 32 MiB each and 256 MiB a heap. Only glibc can.

    Else pages of each picture come from the system, which zeroes them one by one while other threads wait for its
    lock, and some of them for Python's: it is held where Pillow makes room for a picture.
    """
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, LARGEST_KEPT_BYTES)
        mallopt(_M_TRIM_THRESHOLD, MOST_KEPT_BYTES)
