"""What commands say beside their output: lines on stderr that begin with the program's name."""

from __future__ import annotations

import sys


def say(line: str) -> None:
    """At once, whatever buffers stderr."""
    print(f"encpool: {line}", file=sys.stderr, flush=True)
