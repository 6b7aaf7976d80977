"""`Roster`: the workers that have registered, and which of them may get leases."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count

from cluster.routing.desk import ModelDesk
from cluster.routing.worker_view import WorkerView
from encoder.adapters.base import EncoderAdapter
from workers.costs import CostTable
from workers.messages import Beat, ErrorNote, WorkerReport, WorkerState

logger = logging.getLogger(__name__)

SUSPICION_S = 1.5  # reports that were under way when a worker died arrive well within it


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A worker and how the router thinks of it."""

    worker_id: str
    incarnation: str
    model: str
    state: WorkerState
    error: ErrorNote | None
    in_flight_ms: float
    in_flight_bytes: int  # encoded
    num_leases: int
    leasable: bool
    host: str
    pid: int
    gpu_uuid: str | None


class Roster:
    """Workers by id, and by model those that may get leases. One thread at a time."""

    def __init__(
        self,
        adapter: EncoderAdapter,
        others: Mapping[str, EncoderAdapter],
        *,
        silent_timeout_s: float,
        now_s: Callable[[], float],
        rng: random.Random,
    ) -> None:
        """`adapter` is the first model's; `others` are those of the pool's other models, by name."""
        self.views: dict[str, WorkerView] = {}
        self._first = ModelDesk(adapter, now_s=now_s, rng=rng)
        self._others = {model: ModelDesk(other, now_s=now_s, rng=rng) for model, other in others.items()}
        self._silent_timeout_s = silent_timeout_s
        self._now_s = now_s
        self._reports: dict[str, WorkerReport] = {}
        self._draining: set[str] = set()  # workers that are being taken away
        self._checks: list[tuple[float, int, WorkerView]] = []  # a heap: when time alone may change who is leasable
        self._check_numbers = count()
        self._next_checks: dict[str, int] = {}  # by worker id: number of its one check that still counts

    def desk(self, model: str) -> ModelDesk:
        """This model's; without a name, or with one that no other model has, the first one's."""
        return self._others.get(model, self._first)

    def desks(self) -> Iterator[ModelDesk]:
        """Those of all models."""
        yield self._first
        yield from self._others.values()

    # --- what is heard -------------------------------------------------------------------------------------------

    def register(self, report: WorkerReport) -> WorkerView | None:
        """A worker is ready, holds other graphs than before, or could not start. A new incarnation starts empty.

        Returns the view of the incarnation before it, if there was another.
        """
        adapter = self.desk(report.model).adapter
        costs = CostTable(
            report.graphs,
            axis_choices=adapter.axis_choices,
            measure=adapter.measure,
            eager_ms_per_patch=report.eager_ms_per_patch,
            eager_base_ms=report.eager_base_ms,
        )
        view, gone = self.views.get(report.worker_id), None
        if view is not None:
            self._unlist(view)
        if view is None or view.incarnation != report.incarnation:
            gone = view
            view = self.views[report.worker_id] = WorkerView(
                worker_id=report.worker_id,
                incarnation=report.incarnation,
                model=report.model,
                state=report.state,
                costs=costs,
                max_queue_ms=report.max_queue_ms,
            )
        view.state, view.costs = report.state, costs
        view.max_queue_ms, view.max_queue_bytes = report.max_queue_ms, report.max_queue_bytes
        view.heard_s = self._now_s()
        self._reports[report.worker_id] = report
        self._refresh(view)
        logger.info("%s is %s with %d graphs", report.incarnation, report.state, len(report.graphs))
        return gone

    def hear(self, beat: Beat) -> bool:
        """A worker lives; False when this incarnation of it has not registered."""
        view = self.views.get(beat.worker_id)
        if view is None or view.incarnation != beat.incarnation:
            return False
        view.heard_s = self._now_s()
        is_settled = self._is_listed(view) or beat.worker_id in self._draining
        if view.state is not beat.state or not is_settled:
            view.state = beat.state
            self._refresh(view)
        return True

    def suspect(self, incarnation: str) -> WorkerView | None:
        """A client found this worker dead or stuck: no leases until it is heard from again.

        Returns its view until now, which held its leases: they count nowhere any more.
        """
        for view in self.views.values():
            if view.incarnation == incarnation:
                if self._is_listed(view):  # its other callers say the same in a moment
                    logger.warning("%s is suspected dead", incarnation)
                    self._unlist(view)
                self.views[view.worker_id] = replace(
                    view,
                    in_flight_ms=0.0,
                    in_flight_bytes=0,
                    urgent_ms=0.0,
                    urgent_bytes=0,
                    heard_s=float("-inf"),
                    suspect_until_s=self._now_s() + SUSPICION_S,
                )
                return view
        return None

    def drain(self, worker_id: str) -> None:
        """No more leases for this worker, whatever it reports, until it is forgotten."""
        self._draining.add(worker_id)
        view = self.views.get(worker_id)
        if view is not None:
            self._refresh(view)

    def forget(self, worker_id: str) -> WorkerView | None:
        """The worker was taken out of the pool. Returns its view."""
        self._draining.discard(worker_id)
        view = self.views.pop(worker_id, None)
        self._reports.pop(worker_id, None)
        self._next_checks.pop(worker_id, None)
        if view is not None:
            self._unlist(view)
        return view

    # --- who may get leases --------------------------------------------------------------------------------------

    def check(self) -> None:
        """List no worker that has been silent for too long, and those again whose time under suspicion is over."""
        now_s = self._now_s()
        while self._checks and self._checks[0][0] <= now_s:
            _, number, view = heappop(self._checks)
            if self.views.get(view.worker_id) is view and self._next_checks.get(view.worker_id) == number:
                self._refresh(view)

    def _refresh(self, view: WorkerView) -> None:
        """List the worker if it may get leases, else not, and look again when time alone may change that."""
        now_s = self._now_s()
        ready = view.state is WorkerState.READY and view.worker_id not in self._draining
        silent_at_s = view.heard_s + self._silent_timeout_s
        if ready and view.suspect_until_s <= now_s < silent_at_s:
            if not self._is_listed(view):
                self.desk(view.model).index.add(view)
            check_s = silent_at_s
        else:
            self._unlist(view)
            check_s = view.suspect_until_s
        if ready and check_s > now_s:
            self._next_checks[view.worker_id] = number = next(self._check_numbers)
            heappush(self._checks, (check_s, number, view))

    def _is_listed(self, view: WorkerView) -> bool:
        return view in self.desk(view.model).index

    def _unlist(self, view: WorkerView) -> None:
        if self._is_listed(view):
            self.desk(view.model).index.remove(view)

    # --- what it tells -------------------------------------------------------------------------------------------

    def members(self, num_leases: Mapping[WorkerView, int]) -> list[Member]:
        """Every worker that has registered, with how many leases it has."""
        members = []
        for view in self.views.values():
            report = self._reports[view.worker_id]
            members.append(
                Member(
                    worker_id=view.worker_id,
                    incarnation=view.incarnation,
                    model=view.model,
                    state=WorkerState.DRAINING if view.worker_id in self._draining else view.state,
                    error=report.error,
                    in_flight_ms=view.in_flight_ms,
                    in_flight_bytes=view.in_flight_bytes,
                    num_leases=num_leases.get(view, 0),
                    leasable=self._is_listed(view),
                    host=report.host,
                    pid=report.pid,
                    gpu_uuid=report.gpu_uuid,
                )
            )
        return members

    def worker_ids(self, model: str | None = None) -> list[str]:
        """Those that have registered and are to stay: all of them, or those with one model ("": the first one)."""
        return [
            worker_id
            for worker_id, view in self.views.items()
            if worker_id not in self._draining and (model is None or self.desk(view.model) is self.desk(model))
        ]
