"""`encpool trace`: writes what a running pool encodes to a trace file, until told to stop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from cluster.planning.traces import TraceRecord, TraceWriter
from workers.messages import TracedItem

POLL_S = 1.0  # the router keeps items for a fetch this often; it stops tracing when nobody fetches for longer


def record(
    take: Callable[[], Sequence[TracedItem]],
    writer: TraceWriter,
    *,
    duration_s: float = math.inf,
    tell: Callable[[int], None] = lambda number: None,
    now_s: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Fetch and write items until time is up or somebody presses Ctrl-C; how many there were.

    Args:
        take: items that ended since it was called before.
        tell: hears the number of items written so far, now and then.
    """
    until_s = now_s() + duration_s
    number = 0
    take()  # from now on
    try:
        while (left_s := until_s - now_s()) > 0:
            sleep(min(POLL_S, left_s))
            number += _write(take(), writer)
            tell(number)
    except KeyboardInterrupt:
        number += _write(take(), writer)
    return number


def _write(items: Sequence[TracedItem], writer: TraceWriter) -> int:
    for item in items:
        writer.write(
            TraceRecord(
                time_s=item.time_s, model=item.model, grids=item.grids, graphs=item.graphs, misses=item.misses,
                ms=item.ms,
            )
        )  # fmt: skip
    return len(items)
