"""`encpool top`: a pool's workers, refreshed."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from rich.console import Console
from rich.live import Live
from rich.table import Table

from cluster.lifecycle.status_table import RIGHT, Row, cells, columns_of, graph_lines, headline, rows_of, status_table
from cluster.pool import EncoderPool

COLOURS = {"ready": "green", "starting": "yellow", "restarting": "red", "lost": "red"}


def watch_pool(pool: EncoderPool, *, every_s: float, console: Console | None = None) -> None:
    """Show the pool until Ctrl-C; once, as plain text, where nobody watches."""
    console = console or Console()
    status, stats = pool.status(), pool.stats()
    if not console.is_terminal:
        print(status_table(status, stats))
        return
    before, before_s = rows_of(status, stats), time.monotonic()
    with suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False, screen=True) as live:
        while True:
            status, stats = pool.status(), pool.stats()
            rows, now_s = rows_of(status, stats), time.monotonic()
            rates = items_per_s(before, rows, now_s - before_s)
            notes = [*graph_lines(status), *status.notes]
            live.update(picture(headline(status), columns_of(status), rows, rates, notes), refresh=True)
            before, before_s = rows, now_s
            time.sleep(every_s)


def items_per_s(before: Sequence[Row], after: Sequence[Row], elapsed_s: float) -> dict[str, float]:
    """Items a second of each worker that was there both times, in the same process."""
    counts = {row.worker: (row.pid, row.num_items) for row in before}
    rates = {}
    for row in after:
        pid, num_items = counts.get(row.worker, (None, None))
        if pid is not None and pid == row.pid and num_items is not None and row.num_items is not None:
            rates[row.worker] = (row.num_items - num_items) / max(elapsed_s, 1e-9)
    return rates


def picture(
    title: str, columns: Sequence[str], rows: Sequence[Row], rates: Mapping[str, float], notes: Sequence[str]
) -> Table:
    """One frame."""
    table = Table(title=f"{title}; {sum(rates.values()):.1f} items/s", title_justify="left", expand=True)
    table.caption, table.caption_justify = "\n".join(notes), "left"
    for name in (*columns, "items/s"):
        table.add_column(name, justify="right" if name in (*RIGHT, "items/s") else "left", no_wrap=True)
    for row in rows:
        rate = rates.get(row.worker)
        table.add_row(*cells(row, columns), "-" if rate is None else f"{rate:.1f}", style=COLOURS.get(row.state))
    return table
