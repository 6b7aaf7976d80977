"""`GpuLoop`: the one thread that owns the device. It loads, captures, proves itself, and then replays what waits.

Between replays it brings its graphs to what it was asked for (graph_change.py).

A run that fails is not the end: its items run again apart and eagerly, so that only the guilty one fails; out of
memory, runs are halved and then the largest graph is dropped. Only a lost device context, or an assertion of ours
that fails, ends the loop.
"""

# Shapes: T output rows of a segment, E width of a token.

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from encoder.adapters.base import Segment
from encoder.errors import EncodeError
from encoder.items import prepare_item
from encoder.packing import EagerCost, GraphView, Replay
from encoder.runner import EncoderRunner, Launch
from encoder.runner_stats import RunnerStats
from encoder.types import GraphKey
from workers.batcher import Batch, Batcher, Waiting
from workers.config import WorkerConfig
from workers.costs import CostTable
from workers.graph_change import GraphChanger
from workers.probe import probe

logger = logging.getLogger(__name__)

REFRESH_S = 5.0  # how often costs are compared with what replays really take
NOTABLE_CHANGE = 0.1  # of a cost; smaller ones are not worth telling anyone
IDLE_WAIT_S = 0.5  # how long the thread sleeps on an empty queue before it looks around
QUIET_S = 0.05  # without work, until a change of graphs goes on without regard to its pace
NEAR_END = 0.8  # of a replay's time: it may take that much less than predicted without being landed late
LOOK_S = 0.005  # how often a launch is looked at that may end earlier still
RETRIED = "replay_failed"  # miss reason of segments that ran eagerly because a run of theirs failed


@dataclass(frozen=True, slots=True, eq=False)
class InFlight:
    """A batch under way on the device."""

    batch: Batch
    launch: Launch
    near_end_s: float  # when it will soon be over, if it takes what its graph takes; on the monotonic clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """The graphs as others see them: made on the GPU thread, which alone may look into the runner."""

    graphs: tuple[GraphView, ...]
    known: tuple[GraphView, ...]  # every graph captured since the start
    eager: EagerCost
    used_bytes: int
    limit_bytes: int


class GpuLoop:
    """Runs on one thread from `start_up` to the end of `run`. Others read `holdings`, `costs` and `stats`."""

    def __init__(
        self,
        config: WorkerConfig,
        batcher: Batcher,
        runner: EncoderRunner,
        *,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.runner = runner
        self.capture_s = 0.0
        self.failed_graphs: tuple[tuple[GraphKey, str], ...] = ()  # that could not be captured at the start, and why
        limit_gib = config.graph_memory_gib
        self.changer = GraphChanger(
            runner, limit_bytes=None if limit_gib is None else int(limit_gib * 2**30), now_s=now_s
        )
        self._probed = EagerCost(base_ms=0.0, ms_per_patch=0.0, measured=False)  # where the runner can't tell
        self._config = config
        self._batcher = batcher
        self._now_s = now_s
        self._in_flight: deque[InFlight] = deque()
        self._use_graphs()

    @property
    def graphs(self) -> tuple[GraphView, ...]:
        """The graphs held, with their costs as last published."""
        return self.holdings.graphs

    @property
    def stats(self) -> RunnerStats:
        return self.runner.stats

    def start_up(self) -> None:
        """Capture, and put one picture through every step that an item takes. Raises what keeps it from working."""
        captured = self.runner.capture()
        self.capture_s, self.failed_graphs = captured.seconds, tuple(captured.failed.items())
        self._probed = probe(self.runner)
        self.runner.forget_stats()
        self._use_graphs()

    def run(self) -> None:
        """Keep launches in flight, finish the oldest first, until the batcher is aborted.

        Raises torch.AcceleratorError when the device context is lost, AssertionError when our own state is.
        """
        refreshed_s = self._now_s()
        is_idle = False
        while not self._batcher.aborted:
            if self._now_s() - refreshed_s > REFRESH_S:
                refreshed_s = self._now_s()
                if self._costs_moved():
                    self._use_graphs()
            if self.changer.due(is_idle=is_idle):
                self._change_graphs()
            batch = self._next()
            is_idle = batch is None and not self._in_flight  # nothing came for a while
            if batch is not None:
                try:
                    self._in_flight.append(self._launch(batch))
                except Exception as error:  # whatever a kernel, the device or an adapter raises
                    self._rescue(batch.entries, error)
            elif self._in_flight:
                self._land(self._in_flight.popleft())

    def ask(self, keys: Sequence[GraphKey]) -> None:
        """Hold these graphs from now on. From any thread; returns at once."""
        self.changer.ask(keys)
        self._batcher.wake()

    def _change_graphs(self) -> None:
        while self._in_flight:
            self._land(self._in_flight.popleft())
        self.changer.step()
        self._use_graphs()

    def _next(self) -> Batch | None:
        """Work for the device as soon as there is some; None when a launch is to be landed first, or nothing came.

        While a launch under way has long to go, work is what to wait for; near its end, `_land` waits for that alone:
        a second thread that waited for it beside us would tell us half a millisecond late.
        """
        if not self._in_flight:
            wait_s = QUIET_S if self.changer.is_pending else IDLE_WAIT_S
            return self._batcher.take(self.runner.plan, wait_s=wait_s)
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

    def prepare(self, encoded: bytes) -> Iterator[list[Segment]]:
        """Encoded bytes to segments, in parts, on the CPU. From any thread."""
        return prepare_item(encoded, self.runner.adapter, self._config.encoder)

    def _use_graphs(self) -> None:
        """Publish the graphs and costs as they are now."""
        runner = self.runner
        self.holdings = Holdings(
            graphs=runner.graph_views(),
            known=runner.known_graphs(),
            eager=runner.eager or self._probed,
            used_bytes=runner.graph_memory().used_bytes,
            limit_bytes=self.changer.limit_bytes(),
        )
        self.costs = CostTable(
            self.holdings.graphs,
            axis_choices=runner.adapter.axis_choices,
            measure=runner.adapter.measure,
            eager_ms_per_patch=self.holdings.eager.ms_per_patch,
            eager_base_ms=self.holdings.eager.base_ms,
        )

    def _costs_moved(self) -> bool:
        now = {view.key: view.cost_ms for view in self.runner.graph_views()}
        costs = [(view.cost_ms, now[view.key]) for view in self.graphs if view.key in now]
        if self.runner.eager is not None:
            costs.append((self.holdings.eager.ms_per_patch, self.runner.eager.ms_per_patch))
        return any(abs(new - old) > NOTABLE_CHANGE * old for old, new in costs)

    def _launch(self, batch: Batch) -> InFlight:
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
        return InFlight(batch, launch, began_s + NEAR_END * cost_ms / 1e3)

    def _land(self, flight: InFlight) -> None:
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
            # Only half precision is that narrow: with finite weights the others do not get there.
            if tokens_TE.dtype == torch.float16 and not bool(tokens_TE.isfinite().all()):
                job.fail(EncodeError("its tokens exceed float16, which ends at 65,504; use dtype bfloat16 or float32"))
            else:
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
        self.changer.give_up(largest.key, "dropped: the device ran out of memory")
        self._use_graphs()
        logger.warning("out of memory: dropped graph %s, %d left", largest.key, len(self.graphs))
