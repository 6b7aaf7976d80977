"""Processes of this machine, told apart though their numbers are used again, and one of our own that serves."""

from __future__ import annotations

import gc
from pathlib import Path


def settle() -> None:
    """What a process that only serves has loaded by now stays: no full collection shall go through all of it again.

    Each would hold the interpreter for tenths of a second, in which nobody is served.
    """
    gc.collect()
    gc.freeze()


def born(pid: int) -> str | None:
    """When a process started, in clock ticks since the machine did; None when there is none, or only its exit code."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]
