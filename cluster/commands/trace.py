"""`encpool trace`: record the traffic of a running pool, for `encpool plan`."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.commands.arguments import OK, add_pool, positive_number
from cluster.commands.standing import connected

if TYPE_CHECKING:
    from cluster.commands.arguments import Commands


def add(commands: Commands) -> None:
    """Declare the command."""
    trace = commands.add_parser(
        "trace",
        help="record what a running pool encodes, for `encpool plan`",
        description="Note each item that the pool encodes, and what became of it, in a file: about 120 bytes an item. "
        "Ends after --duration, or with Ctrl-C. An existing trace is added to.",
    )
    add_pool(trace)
    trace.add_argument("--out", type=Path, required=True, metavar="FILE", help="the trace")
    trace.add_argument("--duration", type=positive_number, metavar="S", help="seconds (default: until Ctrl-C)")
    trace.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Record."""
    from cluster.planning.recording import record
    from cluster.planning.traces import TraceWriter

    def tell(number: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{number} items", end="", file=sys.stderr, flush=True)

    with connected(parsed.pool) as pool, TraceWriter(parsed.out, flush_s=1.0) as writer:
        number = record(pool.take_trace, writer, duration_s=parsed.duration or math.inf, tell=tell)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    print(f"{number} items of pool {pool.name!r} recorded in {parsed.out}")
    return OK
