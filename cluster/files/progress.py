"""How far a run is: a bar on a terminal, a plain line every few seconds in a pipe or a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from encoder.errors import EncoderPoolError

if TYPE_CHECKING:
    from cluster.lifecycle.stats import PoolStats

BAR_INTERVAL_S = 1.0
LINE_INTERVAL_S = 5.0
MAX_ERROR_LINES = 10


class EncodeProgress:
    """Progress of one `encode`, in a `with`. Asks the pool, if there is one, for its counts whenever it shows them."""

    def __init__(
        self,
        total: int,
        stats: Callable[[], PoolStats] | None = None,
        *,
        stream: TextIO | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_done = 0
        self.num_failed = 0
        self._total = total
        self._graph_rates = ""
        self._stats = stats
        self._before: PoolStats | None = None
        self._stream = stream = stream or sys.stderr
        self._now_s = now_s
        self._started_s = self._shown_s = now_s()
        self._bar = _bar(stream, _Live(self._live)) if stream.isatty() else None
        self._interval_s = BAR_INTERVAL_S if self._bar else LINE_INTERVAL_S
        self._task = self._bar.add_task("encoding", total=total) if self._bar else None

    def __enter__(self) -> Self:
        if self._stats is not None:
            with suppress(EncoderPoolError):
                self._before = self._stats()
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return self._now_s() - self._started_s

    @property
    def items_per_s(self) -> float:
        """Items done a second, since the start."""
        return self.num_done / self.elapsed_s if self.elapsed_s > 0 else 0.0

    def advance(self, error: str | None = None) -> None:
        """Count one item; `error` names it and says what was wrong."""
        self.num_done += 1
        if error is not None:
            self.num_failed += 1
            if self.num_failed <= MAX_ERROR_LINES:
                self._say(error)
            if self.num_failed == MAX_ERROR_LINES:
                self._say("further errors are in the manifest alone")
        if self._bar and self._task is not None:
            self._bar.update(self._task, completed=self.num_done)
        now_s = self._now_s()
        if now_s - self._shown_s >= self._interval_s:
            self._shown_s = now_s
            self._show()

    def rates(self) -> str:
        """Throughput, and how the pool's graphs and caches did since the start, for whomever they worked.

        A pool too busy to tell is no reason to stop.
        """
        if self._stats is None:
            return self._live()
        with suppress(EncoderPoolError):
            if self._before is not None:
                rates = self._stats().rates_since(self._before)
                self._graph_rates = "".join(
                    f", {text.format(share)}"
                    for text, share in (
                        ("hit rate {:.0%}", rates.hit_rate),
                        ("fill {:.0%}", rates.fill),
                        ("{:.0%} from the cache", rates.cached),
                    )
                    if share is not None
                )
        return self._live()

    def _live(self) -> str:
        """Throughput now, and what the pool told last."""
        return f"{self.items_per_s:.1f} items/s{self._graph_rates}"

    def _show(self) -> None:
        counts = self.rates()
        if not self._bar:
            self._say(f"{self.num_done}/{self._total} items, {counts}")

    def _say(self, line: str) -> None:
        if self._bar:
            self._bar.console.print(f"encpool: {line}", markup=False, highlight=False, soft_wrap=True)
        else:
            print(f"encpool: {line}", file=self._stream, flush=True)


class _Live(ProgressColumn):
    """A text that is asked for whenever the bar is drawn."""

    def __init__(self, text: Callable[[], str]) -> None:
        super().__init__()
        self._text = text

    def render(self, _: Task) -> Text:
        return Text(self._text())


def _bar(stream: TextIO, counts: ProgressColumn) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        counts,
        TimeRemainingColumn(),
        console=Console(file=stream),
    )
