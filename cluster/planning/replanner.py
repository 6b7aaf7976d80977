"""`Replanner`: brings the workers of a model to the graphs that suit its traffic, one at a time, when that pays.

    waiting --(interval)--> planning --(it pays)--> changing one worker after the other --> waiting (cool-down)

A plain class. `tick` returns soon, so a supervisor may call it at each of its own; plans are made in a thread. It
changes the next worker only when the one before says that it is done, and stops at the first sign of trouble: a
worker that dies, does not finish in time, or cannot capture what was planned for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from cluster.planning.histogram import Grids, TrafficHistogram
from cluster.planning.plan import Plan, changes, pays
from cluster.planning.replan_config import ReplanConfig
from cluster.planning.survey import Survey, survey
from encoder.adapters.base import EncoderAdapter
from encoder.config import EncoderConfig
from encoder.types import GraphKey
from workers.messages import WorkerReport, WorkerState

logger = logging.getLogger(__name__)

MAX_NAMED = 4  # graphs that a note names


class Fleet(Protocol):
    """What a replanner needs of a pool. Every call returns within moments."""

    def reports(self) -> Sequence[WorkerReport] | None:
        """Of every worker that there is; None when some do not answer."""

    def report(self, worker_id: str) -> WorkerReport | None:
        """Of one; None when it does not answer."""

    def traffic(self) -> TrafficHistogram | None:
        """Kinds of items that got leases lately; None when the router does not answer."""

    def apply(self, worker_id: str, keys: tuple[GraphKey, ...]) -> None:
        """Let a worker hold these graphs from now on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What was decided last about the graphs of a model, for people."""

    model: str
    note: str
    age_s: float
    next_look_s: float | None  # until the next; None while one is being made or carried out
    num_changes: int  # workers that have changed their graphs so far


class _Planning:
    """A plan that is being made beside us."""

    def __init__(self, problem: Survey, start: Callable[[Callable[[], None]], None]) -> None:
        self.problem = problem
        self.plan: Plan | None = None
        self.failed = False
        start(self._run)

    def _run(self) -> None:
        try:
            self.plan = self.problem.plan()
        except Exception:  # edge of a thread: the pool goes on with the graphs it has
            logger.exception("no plan could be made")
            self.failed = True


class _Change:
    """A change under way on one worker."""

    def __init__(self, report: WorkerReport, keys: tuple[GraphKey, ...], since_s: float) -> None:
        self.worker_id, self.incarnation = report.worker_id, report.incarnation
        self.keys, self.since_s = keys, since_s


class Replanner:
    """See above. One thread at a time."""

    def __init__(
        self,
        fleet: Fleet,
        adapter: EncoderAdapter,
        encoder: EncoderConfig,
        config: ReplanConfig,
        *,
        memory_shares: Mapping[str, float] | None = None,
        now_s: Callable[[], float] = time.monotonic,
        start: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        """`memory_shares`: of a device, by group, where several workers share one. `start` runs a function beside us;
        a thread of its own when left out."""
        self._fleet, self._adapter, self._encoder, self._config = fleet, adapter, encoder, config
        self.memory_shares = memory_shares or {}
        self._now_s = now_s
        self._start = start or _in_a_thread
        self._noted_s = now_s()
        self._next_look_s = now_s() + config.interval_s
        self._planning: _Planning | None = None
        self._queue: deque[tuple[str, tuple[GraphKey, ...]]] = deque()
        self._change: _Change | None = None
        self._banned: set[GraphKey] = set()  # could not be captured
        self._aim = ""  # of the change under way, for people
        self.num_changes = 0  # workers that have changed their graphs
        self.note = "not looked at yet"
        """The last decision, for people."""

    @property
    def is_changing(self) -> bool:
        """Whether workers are to change their graphs, or one is at it."""
        return self._change is not None or bool(self._queue)

    def decision(self) -> Decision:
        """How things stand. From any thread."""
        now_s = self._now_s()
        return Decision(
            model=self._encoder.model,
            note=self.note,
            age_s=now_s - self._noted_s,
            next_look_s=None if self.is_changing or self._planning else max(0.0, self._next_look_s - now_s),
            num_changes=self.num_changes,
        )

    def tick(self) -> None:
        """Take the next step, if it is time for one."""
        if self._change is not None:
            self._watch(self._change)
        elif self._queue:
            self._begin()
        elif self._planning is not None:
            self._decide(self._planning)
        elif self._now_s() >= self._next_look_s:
            self._look()

    def _rest(self, note: str) -> None:
        """Do nothing until the next look."""
        self._planning, self._change = None, None
        self._queue.clear()
        self._next_look_s = self._now_s() + self._config.interval_s
        self._note(note)

    def _note(self, note: str) -> None:
        self.note, self._noted_s = note, self._now_s()
        logger.info("graphs of %s: %s", self._encoder.model, note)

    def _look(self) -> None:
        self._next_look_s = self._now_s() + self._config.interval_s  # whatever comes of it
        traffic, reports = self._fleet.traffic(), self._fleet.reports()
        if traffic is None or reports is None:
            self._rest("workers or the router did not answer")
            return
        if not reports:
            self._rest("no worker is there")
            return
        ready = [report for report in reports if report.state is WorkerState.READY]
        if len(ready) < len(reports):
            late = [f"{report.worker_id} is {report.state}" for report in reports if report not in ready]
            self._rest(f"not all workers are ready: {', '.join(late)}")
            return
        num_items = sum(traffic.counts().values())
        if num_items < self._config.min_items:
            self._rest(f"too few items to plan for: {num_items:.0f} lately, min_items is {self._config.min_items:g}")
            return
        self._planning = _Planning(self._survey(ready, traffic.rates()), self._start)

    def _survey(self, reports: Sequence[WorkerReport], rates: dict[Grids, float]) -> Survey:
        gib = self._config.memory_gib
        return survey(
            reports, rates, self._adapter, self._encoder,
            memory_bytes=None if gib is None else int(gib * 2**30), memory_shares=self.memory_shares,
            banned=self._banned,
        )  # fmt: skip

    def _decide(self, planning: _Planning) -> None:
        if planning.failed:
            self._rest("no plan could be made")
            return
        proposed, problem = planning.plan, planning.problem
        if proposed is None:
            return  # still at it
        wanted = problem.wanted(proposed)
        todo = [change for change in changes(problem.current, proposed) if change.capture]
        num_captures = sum(len(change.capture) for change in todo)
        now, then = proposed.current, proposed.forecast
        assert now is not None
        worth = {"horizon_s": self._config.horizon_s, "least_gain": self._config.min_gain}
        capture_ms = num_captures * problem.capture_ms
        is_faster = pays(now, then, capture_ms=capture_ms, **worth)
        # A pool near its limit gains from better shares of the work, though all together do as much.
        evens_out = (
            now.busiest_ms_per_s > 500
            and then.ms_per_s < 1.02 * now.ms_per_s
            and pays(
                replace(now, ms_per_s=now.busiest_ms_per_s),
                replace(then, ms_per_s=then.busiest_ms_per_s),
                capture_ms=capture_ms / len(problem.rooms),
                **worth,
            )
        )
        saved = 1 - then.ms_per_s / now.ms_per_s if now.ms_per_s else 0.0
        if not todo or not (is_faster or evens_out):
            self._rest(
                f"kept: the best plan would save {saved:.1%} of the GPU time with {num_captures} captures; a change "
                f"must save {self._config.min_gain:.1%} and within {self._config.horizon_s:g} s what captures take"
            )
            return
        self._planning = None
        self._queue.extend((change.worker_id, problem.keys_of(change.worker_id, wanted[change.worker_id]))
                           for change in todo)  # fmt: skip
        names = Counter(_short(key) for change in todo for key in change.capture)
        captures = ", ".join(f"{name} on {count}" for name, count in names.most_common(MAX_NAMED))
        more = f", {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
        self._aim = f"{len(todo)} workers to capture {captures}{more}; {saved:.1%} less GPU time predicted"
        self._note(f"changing {self._aim}")

    def _begin(self) -> None:
        worker_id, keys = self._queue.popleft()
        report = self._fleet.report(worker_id)
        if report is None or report.state is not WorkerState.READY:
            self._rest(f"stopped: {worker_id} is not ready")
            return
        self._change = _Change(report, keys, self._now_s())
        self._fleet.apply(worker_id, keys)

    def _watch(self, change: _Change) -> None:
        report = self._fleet.report(change.worker_id)
        late = self._now_s() - change.since_s > self._config.change_timeout_s
        if report is not None and (report.incarnation != change.incarnation or report.state is not WorkerState.READY):
            self._rest(f"stopped: {change.worker_id} did not live through it")
        elif report is None or report.graph_change is None or report.graph_change.wanted != change.keys:
            if late:
                self._rest(f"stopped: {change.worker_id} does not answer")
        elif report.graph_change.done and report.graph_change.failed:
            failed = [key for key, _ in report.graph_change.failed]
            self._banned.update(replace(key, encoder=self._adapter.encoder) for key in failed)
            _, reason = report.graph_change.failed[0]
            self._rest(f"stopped: {change.worker_id} could not capture {len(failed)} graphs, {failed[0]}: {reason}")
        elif report.graph_change.done:
            self.num_changes += 1
            self._change = None
            if not self._queue:
                self._rest(f"changed {self._aim}")
        elif late:
            self._rest(f"stopped: {change.worker_id} was not done after {self._config.change_timeout_s:g} s")


def _short(key: GraphKey) -> str:
    """A graph without its encoder, such as `image[packed]/64`."""
    return str(key).partition("/")[2]


def _in_a_thread(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="planner", daemon=True).start()
