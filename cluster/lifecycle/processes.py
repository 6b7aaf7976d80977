"""Processes of this machine, told apart though their numbers are used again."""

from __future__ import annotations

from pathlib import Path


def born(pid: int) -> str | None:
    """When a process started, in clock ticks since the machine did; None when there is none, or only its exit code."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]
