"""`Job`: one item inside a worker, from its admission until it is settled."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from encoder.errors import EncoderPoolError
from workers.admission import Load
from workers.priority import Priority

if TYPE_CHECKING:
    import torch


class Job:
    """One item inside a worker. Settled exactly once: by its last segment, or by the first error to reach it."""

    def __init__(
        self,
        *,
        cost_ms: float,
        deadline_s: float | None = None,
        num_bytes: int = 0,
        priority: Priority = Priority.BATCH,
    ) -> None:
        self.cost_ms = cost_ms
        self.deadline_s = deadline_s  # on the batcher's clock
        self.num_bytes = num_bytes  # as it came, encoded
        self.priority = priority
        self.rank_s = 0.0  # its place in line, from its admission
        self.on_settled: Callable[[Job], None] = lambda job: None
        self.error: EncoderPoolError | None = None
        self.outputs: list[torch.Tensor | None] = []  # one a segment
        self.graphs: dict[str, None] = {}  # in order of use
        self.misses: dict[str, None] = {}
        self.timings_ms: dict[str, float] = {}
        self.cached = False  # its tokens were computed for another: from the cache, or of an identical item
        self.ready_s = 0.0
        self.started_s: float | None = None
        self.settled = False
        self._lock = threading.Lock()
        self._num_missing = 0
        self._told = threading.Event()

    @property
    def load(self) -> Load:
        """What it adds to the queue."""
        return Load(self.cost_ms, self.num_bytes)

    def wait(self) -> None:
        """Block until settled, and until `on_settled` has heard of it."""
        self._told.wait()

    def expect(self, num_segments: int) -> None:
        """Say how many segments it has, before the first of them may run."""
        self.outputs = [None] * num_segments
        self._num_missing = num_segments

    def deliver(self, index: int, tokens_TE: torch.Tensor) -> None:
        """Keep the output of one segment; the last one settles the job."""
        with self._lock:
            if self.settled:
                return
            assert self.outputs[index] is None, "a segment ran twice"
            self.outputs[index] = tokens_TE
            self._num_missing -= 1
            if self._num_missing:
                return
        self.complete(self.outputs)

    def complete(self, outputs: Sequence[torch.Tensor | None]) -> None:
        """Settle with all of the item's rows at once, unless settled already."""
        self._settle(outputs, None)

    def fail(self, error: EncoderPoolError) -> None:
        """Settle with an error, unless settled already."""
        self._settle((), error)

    def _settle(self, outputs: Sequence[torch.Tensor | None], error: EncoderPoolError | None) -> None:
        with self._lock:
            if self.settled:
                return
            self.outputs, self.error = list(outputs), error
            self.settled = True
        try:
            self.on_settled(self)
        finally:  # not before: who waits for it finds it counted, and its place in the queue free
            self._told.set()
