"""From the graphs a worker holds to those it should hold, one step between two replays. `next_step` is pure.

A change captures before it drops, largest first, so that what the old graphs serve is served throughout; where memory
is short it drops first. A key that cannot be captured is left out and told. Steps are paced: of the time that a
change takes while there is work, `CAPTURE_SHARE` goes to captures and the rest to replays.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from encoder.errors import ConfigError
from encoder.packing import GraphView
from encoder.runner import EncoderRunner
from encoder.types import GraphKey
from workers.messages import GraphChange

logger = logging.getLogger(__name__)

CAPTURE_SHARE = 0.12
"""Of a busy worker's time that a change may take: well under a fifth, since captures also empty the pipeline."""

KEEP_FREE = 0.1
"""Of what the device and the graphs have, left for eager runs where no limit is configured."""

CPU_LIMIT_BYTES = 1 << 30
"""For graphs on a CPU where no limit is configured."""

WASTE_BYTES = 256 << 20
"""Scratch that graphs of another size leave unused; more of it is worth capturing all anew."""


class Action(StrEnum):
    """What a step does."""

    CAPTURE = "capture"
    DROP = "drop"
    START_POOL = "start_pool"  # of scratch, for all that is captured or captured anew after it
    REFUSE = "refuse"  # no memory for it, whatever is dropped


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One thing to do between two replays."""

    action: Action
    key: GraphKey | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What a step may take."""

    used_bytes: int  # by graphs
    scratch_bytes: int  # of that: the pool that a capture would share
    limit_bytes: int  # for graphs
    free_bytes: int | None  # of the device; None: nobody counts


def next_step(
    held: Mapping[GraphKey, GraphView],
    wanted: Sequence[GraphKey],
    *,
    known: Mapping[GraphKey, GraphView],
    patches: Callable[[GraphKey], int],
    memory: Memory,
    refused: Collection[GraphKey] = (),
    stale: Collection[GraphKey] = (),
) -> Step | None:
    """The next step from what is held to what is wanted; None when it is reached.

    Args:
        known: every graph ever captured, for its size; the size of others is taken from these by their patches.
        refused: keys that could not be captured.
        stale: held keys whose scratch is in another pool than the next capture's.
    """
    drops = sorted(set(held) - set(wanted), key=lambda key: (-held[key].num_bytes, str(key)))
    missing = [key for key in wanted if key not in held and key not in refused]
    again = [key for key in wanted if key in held and key in stale and key not in refused]
    sizes = {key: size_of(key, known, patches) for key in (*missing, *again, *(set(held) & set(wanted)))}
    scratch = max((scratch for _, scratch in sizes.values()), default=0)
    # A larger graph finds no blocks of its size in the pool, and a pool keeps its size while any graph is in it.
    waste = (memory.scratch_bytes if scratch <= memory.scratch_bytes else memory.scratch_bytes + scratch) - scratch
    is_wasteful = bool(held and sizes) and not stale and waste > max(WASTE_BYTES, scratch // 4)
    if is_wasteful and _fits(memory, own=max(own for own, _ in sizes.values()), scratch=scratch, grows=scratch):
        return Step(action=Action.START_POOL)
    # The most scratch first: the others find room in what it brings.
    for key in sorted((*missing, *again), key=lambda key: (-sizes[key][1], -patches(key), str(key))):
        own, scratch = sizes[key]
        if _fits(memory, own=own, scratch=scratch, grows=scratch if scratch > memory.scratch_bytes else 0):
            return Step(action=Action.CAPTURE, key=key)
        if drops or again:
            return Step(action=Action.DROP, key=(drops or again)[0])
        return Step(action=Action.START_POOL) if is_wasteful else Step(action=Action.REFUSE, key=key)
    return Step(action=Action.DROP, key=drops[0]) if drops else None


def size_of(key: GraphKey, known: Mapping[GraphKey, GraphView], patches: Callable[[GraphKey], int]) -> tuple[int, int]:
    """Own and scratch bytes of a graph; of one never captured, by its patches as the dearest of those that were."""
    if key in known:
        return known[key].num_bytes, known[key].shared_bytes
    rows = patches(key)
    own = max((view.num_bytes / view.capacity.patches for view in known.values()), default=0.0)
    scratch = max((view.shared_bytes / view.capacity.patches for view in known.values()), default=0.0)
    return int(rows * own), int(rows * scratch)


def _fits(memory: Memory, *, own: int, scratch: int, grows: int) -> bool:
    """Whether a capture keeps the limit, and finds the memory that its warm-up takes beside the pool."""
    return memory.used_bytes + own + grows <= memory.limit_bytes and (
        memory.free_bytes is None or own + scratch <= memory.free_bytes
    )


class GraphChanger:
    """Brings one runner's graphs to what was last asked for. `ask` comes from any thread, the rest from the GPU's."""

    def __init__(
        self, runner: EncoderRunner, *, limit_bytes: int | None, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        """`limit_bytes` bounds the memory of all graphs; None: what the device has, less `KEEP_FREE`."""
        self._runner = runner
        self._limit_bytes = limit_bytes
        self._now_s = now_s
        self._lock = threading.Lock()
        self._asked: tuple[GraphKey, ...] | None = None  # and not begun
        self._wanted: tuple[GraphKey, ...] | None = None
        self._failed: dict[GraphKey, str] = {}
        self._not_before_s = 0.0
        self._num_captures, self._capture_s = 0, 0.0
        self.last: GraphChange | None = None
        """How the latest change stands."""

    def ask(self, wanted: Sequence[GraphKey]) -> None:
        """Hold these graphs from now on; a change under way turns to them."""
        with self._lock:
            self._asked = tuple(dict.fromkeys(wanted))

    @property
    def is_pending(self) -> bool:
        """Whether there is a change to make."""
        return self._wanted is not None or self._asked is not None

    def due(self, *, is_idle: bool) -> bool:
        """Whether the next step may be made now."""
        return self.is_pending and (is_idle or self._now_s() >= self._not_before_s)

    def step(self) -> None:
        """Make one step. No launch may be under way."""
        with self._lock:
            if self._asked is not None:
                self._wanted, self._asked = self._asked, None
                self._failed = {}
        if self._wanted is None:
            return
        step = self._next()
        if step is None:
            self._tell(done=True)
            logger.info(
                "the graphs are as asked for: %d held, %d could not be captured",
                len(self._runner.graph_views()), len(self._failed),
            )  # fmt: skip
            self._wanted = None
            return
        started_s = self._now_s()
        self._make(step)
        took_s = self._now_s() - started_s
        self._not_before_s = self._now_s() + took_s * (1 / CAPTURE_SHARE - 1)
        self._tell(done=False)

    def give_up(self, key: GraphKey, reason: str) -> None:
        """A graph had to go: a change under way does not bring it back."""
        self._failed[key] = reason

    def capture_ms(self) -> float:
        """Mean time that a capture in traffic took; 0 before the first."""
        return self._capture_s * 1e3 / self._num_captures if self._num_captures else 0.0

    def limit_bytes(self) -> int:
        """Memory that graphs may take."""
        if self._limit_bytes is not None:
            return self._limit_bytes
        memory = self._runner.graph_memory()
        if memory.free_bytes is None:
            return CPU_LIMIT_BYTES
        return int((memory.used_bytes + memory.free_bytes) * (1 - KEEP_FREE))

    def _next(self) -> Step | None:
        assert self._wanted is not None
        memory = self._runner.graph_memory()
        return next_step(
            {view.key: view for view in self._runner.graph_views()},
            self._wanted,
            known={view.key: view for view in self._runner.known_graphs()},
            patches=self._patches,
            memory=Memory(
                used_bytes=memory.used_bytes,
                scratch_bytes=memory.scratch_bytes,
                limit_bytes=self.limit_bytes(),
                free_bytes=memory.free_bytes,
            ),
            refused=self._failed,
            stale=self._runner.outside_pool(),
        )

    def _patches(self, key: GraphKey) -> int:
        try:
            return self._runner.adapter.capacity(key.axis_keys, key.token_budget).patches
        except (ConfigError, KeyError):  # no graph of this encoder: its capture fails and says so
            return 0

    def _make(self, step: Step) -> None:
        if step.action is Action.START_POOL:
            self._runner.start_pool()
            return
        assert step.key is not None
        if step.action is Action.DROP:
            self._runner.drop(step.key)
        elif step.action is Action.REFUSE:
            self._failed[step.key] = f"no memory for it within {self.limit_bytes() / 2**30:.2f} GiB"
            logger.warning("graph %s is not captured: %s", step.key, self._failed[step.key])
        else:
            self._capture(step.key)

    def _capture(self, key: GraphKey) -> None:
        started_s = self._now_s()
        failure = self._runner.add(key)
        if failure is not None:
            self._failed[key] = failure
            return
        self._num_captures += 1
        self._capture_s += self._now_s() - started_s
        if (used := self._runner.graph_memory().used_bytes) > (limit := self.limit_bytes()):
            self._runner.drop(key)
            self._failed[key] = f"with it the graphs take {used / 2**30:.2f} GiB of {limit / 2**30:.2f}"

    def _tell(self, *, done: bool) -> None:
        assert self._wanted is not None
        held = {view.key for view in self._runner.graph_views()}  # an older capture of a key may still serve
        failed = tuple((key, reason) for key, reason in self._failed.items() if key not in held)
        self.last = GraphChange(wanted=self._wanted, done=done, failed=failed)
