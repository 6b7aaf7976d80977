"""`GpuLoop`: the one thread that owns the device. It loads, captures, proves itself, and then replays what waits.

A run that fails is not the end: its items run again apart and eagerly, so that only the guilty one fails; out of
memory, runs are halved and then the largest graph is dropped. Only a lost device context, or an assertion of ours
that fails, ends the loop.
"""

# Shapes: T output rows of a segment, E width of a token.

from __future__ import annotations

import io
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image

from encoder.adapters.base import Segment
from encoder.errors import EncodeError, WorkerStartError
from encoder.media import decode_image, probe_header
from encoder.packing import GraphView, Replay
from encoder.runner import EncoderRunner, Launch, RunnerStats
from workers.batcher import Batch, Batcher, Waiting
from workers.config import WorkerConfig
from workers.costs import CostTable

logger = logging.getLogger(__name__)

REFRESH_S = 5.0  # how often costs are compared with what replays really take
NOTABLE_CHANGE = 0.1  # of a cost; smaller ones are not worth telling anyone
IDLE_WAIT_S = 0.5  # how long the thread sleeps on an empty queue before it looks around
NEAR_END = 0.8  # of a replay's time: it may take that much less than predicted without being landed late
LOOK_S = 0.005  # how often a launch is looked at that may end earlier still
RETRIED = "replay_failed"  # miss reason of segments that ran eagerly because a run of theirs failed
PROBE_SIZE = (448, 448)
ALONE = Replay(key=None, taken=())  # an eager run that no plan asked for


@dataclass(frozen=True, slots=True, eq=False)
class Flight:
    """A batch under way."""

    batch: Batch
    launch: Launch
    near_end_s: float  # when it will soon be over, if it takes what its graph takes; on the monotonic clock


class GpuLoop:
    """Runs on one thread from `start_up` to the end of `run`. Others read `graphs`, `costs` and `stats`."""

    def __init__(
        self,
        config: WorkerConfig,
        batcher: Batcher,
        runner: EncoderRunner,
        *,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.runner = runner
        self.graphs: tuple[GraphView, ...] = ()
        self.eager_ms_per_patch = 0.0
        self._config = config
        self._batcher = batcher
        self._now_s = now_s
        self._in_flight: deque[Flight] = deque()
        self._use_graphs()

    @property
    def stats(self) -> RunnerStats:
        return self.runner.stats

    def start_up(self) -> None:
        """Capture, and put one picture through every step that an item takes. Raises what keeps it from working."""
        self.runner.capture()
        self._probe()
        self.runner.stats = RunnerStats()
        self._use_graphs()

    def run(self) -> None:
        """Keep launches in flight, finish the oldest first, until the batcher is aborted.

        Raises torch.AcceleratorError when the device context is lost, AssertionError when our own state is.
        """
        refreshed_s = self._now_s()
        while not self._batcher.aborted:
            if self._now_s() - refreshed_s > REFRESH_S:
                refreshed_s = self._now_s()
                if self._costs_moved():
                    self._use_graphs()
            batch = self._next()
            if batch is not None:
                try:
                    self._in_flight.append(self._launch(batch))
                except Exception as error:  # whatever a kernel, the device or an adapter raises
                    self._rescue(batch.entries, error)
            elif self._in_flight:
                self._land(self._in_flight.popleft())

    def _next(self) -> Batch | None:
        """Work for the device as soon as there is some; None when a launch is to be landed first, or nothing came.

        While a launch under way has long to go, work is what to wait for; near its end, `_land` waits for that alone:
        a second thread that waited for it beside us would tell us half a millisecond late.
        """
        if not self._in_flight:
            return self._batcher.take(self.runner.plan, wait_s=IDLE_WAIT_S)
        if len(self._in_flight) >= self._config.replays_in_flight:
            return None
        batch = self._batcher.take(self.runner.plan, wait_s=0.0)
        oldest = self._in_flight[0]
        while batch is None and not oldest.launch.done and not self._batcher.aborted:
            left_s = oldest.near_end_s - time.monotonic()
            if left_s <= 0:
                break
            batch = self._batcher.take(self.runner.plan, wait_s=min(left_s, LOOK_S))
        return batch

    def prepare(self, encoded: bytes) -> list[Segment]:
        """Encoded bytes to segments, on the CPU. From any thread."""
        limits = self._config.encoder
        image = decode_image(encoded, max_pixels=limits.max_pixels, max_bytes=limits.max_bytes)
        return self.runner.adapter.prepare(image)

    def _use_graphs(self) -> None:
        self.graphs = self.runner.graph_views()
        adapter = self.runner.adapter
        self.costs = CostTable(
            self.graphs,
            axis_choices=adapter.axis_choices,
            measure=adapter.measure,
            eager_ms_per_patch=self.eager_ms_per_patch,
        )

    def _costs_moved(self) -> bool:
        now = {view.key: view.cost_ms for view in self.runner.graph_views()}
        return any(
            abs(now[view.key] - view.cost_ms) > NOTABLE_CHANGE * view.cost_ms for view in self.graphs if view.key in now
        )

    def _probe(self) -> None:
        encoded, adapter = probe_picture(), self.runner.adapter
        max_pixels, max_bytes = math.prod(PROBE_SIZE), len(encoded)  # its own: the configured limits may be smaller
        promised = adapter.probe(probe_header(encoded, max_pixels=max_pixels, max_bytes=max_bytes))
        segments = adapter.prepare(decode_image(encoded, max_pixels=max_pixels, max_bytes=max_bytes))
        if tuple(segment.shape.grid for segment in segments) != promised.grids:
            raise WorkerStartError(f"the probe picture was cut into other grids than {promised.grids}")
        first = segments[:1]
        # By graph, then eagerly twice: the second time tells what eager work costs.
        for replay in (self.runner.plan([first[0].shape]), ALONE, ALONE):
            started_s = time.monotonic()
            tokens_TE = self.runner.finish(self.runner.submit(first, replay))[0]
            self.eager_ms_per_patch = (time.monotonic() - started_s) * 1e3 / first[0].shape.num_patches
            if len(tokens_TE) != first[0].shape.num_tokens or not bool(torch.isfinite(tokens_TE).all()):
                raise WorkerStartError(
                    f"the probe picture came back as {tuple(tokens_TE.shape)} with "
                    f"{int((~torch.isfinite(tokens_TE)).sum())} numbers that are not finite "
                    f"({'eagerly' if replay.key is None else replay.key})"
                )

    def _launch(self, batch: Batch) -> Flight:
        now_s = self._now_s()
        for entry in batch.entries:
            if entry.job.started_s is None:
                entry.job.started_s = now_s
                entry.job.timings_ms["wait"] = (now_s - entry.job.ready_s) * 1e3
        launch = self.runner.submit([entry.segment for entry in batch.entries], batch.replay)
        began_s = time.monotonic()
        if self._in_flight:  # it starts behind the one before it
            began_s = max(began_s, self._in_flight[-1].near_end_s)
        cost_ms = next((view.cost_ms for view in self.graphs if view.key == batch.replay.key), 0.0)
        return Flight(batch, launch, began_s + NEAR_END * cost_ms / 1e3)

    def _land(self, flight: Flight) -> None:
        try:
            outputs = self.runner.finish(flight.launch)
        except Exception as error:  # whatever the device or a kernel raises
            self._rescue(flight.batch.entries, error)
            return
        replay = flight.batch.replay
        self._deliver(
            flight.batch.entries,
            outputs,
            graph=None if replay.key is None else str(replay.key),
            miss=RETRIED if replay.reason is None else str(replay.reason),
        )

    def _deliver(
        self, entries: Sequence[Waiting], outputs: Sequence[torch.Tensor], *, graph: str | None, miss: str
    ) -> None:
        now_s = self._now_s()
        for entry, tokens_TE in zip(entries, outputs, strict=True):
            job = entry.job
            if graph is None:
                job.misses[miss] = None
            else:
                job.graphs[graph] = None
            assert job.started_s is not None
            job.timings_ms["replay"] = (now_s - job.started_s) * 1e3
            job.deliver(entry.index, tokens_TE)

    def _rescue(self, entries: Sequence[Waiting], error: Exception, *, ran_alone: bool = False) -> None:
        """A run failed: run its segments in smaller parts and eagerly, until only the guilty item fails.

        `ran_alone` says that the failed run was such a part already.
        """
        while self._in_flight:  # older outputs first, and none may depend on a graph that is dropped below
            self._land(self._in_flight.popleft())
        entries = [entry for entry in entries if not entry.job.settled]
        if not entries:
            return
        jobs = list(dict.fromkeys(entry.job for entry in entries))
        parts: list[Sequence[Waiting]]
        if isinstance(error, torch.OutOfMemoryError):
            if len(entries) > 1:
                half = math.ceil(len(entries) / 2)
                logger.warning("out of memory with %d segments: running %d at a time", len(entries), half)
                parts = [entries[:half], entries[half:]]
            elif self.graphs:
                self._drop_largest()
                parts = [entries]
            else:
                num_patches = entries[0].segment.shape.num_patches
                jobs[0].fail(EncodeError(f"no memory for a segment of {num_patches} patches: {error}"))
                return
        elif isinstance(error, torch.AcceleratorError | AssertionError):
            raise error  # the device context, or our own state, is broken for good: the process must go
        elif ran_alone and len(jobs) == 1:
            jobs[0].fail(EncodeError(f"the encoder failed on it: {type(error).__name__}: {error}"))
            return
        else:
            logger.warning("a run of %d items failed, retrying one by one", len(jobs), exc_info=error)
            parts = [[entry for entry in entries if entry.job is job] for job in jobs]
        for part in parts:
            try:
                self._run_alone(part)
            except Exception as again:  # whatever a kernel, the device or an adapter raises
                self._rescue(part, again, ran_alone=True)

    def _run_alone(self, entries: Sequence[Waiting]) -> None:
        replay = Replay(key=None, taken=tuple(range(len(entries))))
        outputs = self.runner.finish(self.runner.submit([entry.segment for entry in entries], replay))
        self._deliver(entries, outputs, graph=None, miss=RETRIED)

    def _drop_largest(self) -> None:
        largest = max(self.graphs, key=lambda view: view.capacity.patches)
        self.runner.drop(largest.key)
        self._use_graphs()
        logger.warning("out of memory: dropped graph %s, %d left", largest.key, len(self.graphs))


def probe_picture() -> bytes:
    """A small PNG with something to see in it, always the same."""
    width, height = PROBE_SIZE
    rows, columns = np.mgrid[0:height, 0:width]
    pixels = np.stack([rows % 256, columns % 256, (rows * columns) % 256], axis=-1).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG", compress_level=1)
    return buffer.getvalue()
