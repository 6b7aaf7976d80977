"""The router: remembers workers and leases, and hands out leases in batches. Pixels never come near it.

`Router` is a plain class; `RouterActor` is what runs as a Ray actor. Its state can be lost: workers report again.
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster.routing import Choice, Lease, Refusal, WorkerView, assign
from encoder.adapters.base import EncoderAdapter
from encoder.adapters.registry import load_adapter
from encoder.config import EncoderConfig
from encoder.types import ItemShape
from workers.costs import CostTable
from workers.messages import Beat, ErrorNote, WorkerReport, WorkerState

logger = logging.getLogger(__name__)

SUSPICION_S = 1.5  # reports that were under way when a worker died arrive well within it


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRequest:
    """One item that a client wants to send."""

    shape: ItemShape
    exclude: frozenset[str] = frozenset()  # incarnations of workers it must not go to


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A worker and how the router thinks of it."""

    worker_id: str
    incarnation: str
    state: WorkerState
    error: ErrorNote | None
    in_flight_ms: float
    num_leases: int
    leasable: bool
    host: str
    gpu_uuid: str | None


@dataclass(slots=True)
class _Held:
    """A lease and where its cost is counted."""

    worker: WorkerView
    cost_ms: float


class Router:
    """Views, leases and in-flight cost. One thread at a time."""

    def __init__(
        self,
        adapter: EncoderAdapter,
        *,
        lease_timeout_s: float,
        silent_timeout_s: float,
        now_s: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._adapter = adapter
        self._lease_timeout_s = lease_timeout_s
        self._silent_timeout_s = silent_timeout_s
        self._now_s = now_s
        self._rng = rng or random.Random()
        self._workers: dict[str, WorkerView] = {}
        self._reports: dict[str, WorkerReport] = {}
        self._leases: dict[int, _Held] = {}
        self._expiries: deque[tuple[float, int]] = deque()  # in order: every lease lives equally long
        self._next_lease = self._rng.getrandbits(48)  # a restarted router's ids never meet those of the one before

    # --- workers -------------------------------------------------------------------------------------------------

    def register(self, report: WorkerReport) -> None:
        """A worker is ready, holds other graphs than before, or could not start. A new incarnation starts empty."""
        known = self._workers.get(report.worker_id)
        if known is not None and known.incarnation != report.incarnation:
            self._drop_leases(known)
            known = None
        self._reports[report.worker_id] = report
        self._workers[report.worker_id] = view = WorkerView(
            worker_id=report.worker_id,
            incarnation=report.incarnation,
            state=report.state,
            costs=CostTable(
                report.graphs,
                axis_choices=self._adapter.axis_choices,
                measure=self._adapter.measure,
                eager_ms_per_patch=report.eager_ms_per_patch,
            ),
            max_queue_ms=report.max_queue_ms,
            heard_s=self._now_s(),
        )
        if known is not None:
            view.in_flight_ms, view.suspect_until_s = known.in_flight_ms, known.suspect_until_s
            for held in self._leases.values():
                if held.worker is known:
                    held.worker = view
        logger.info("%s is %s with %d graphs", report.incarnation, report.state, len(report.graphs))

    def beat(self, beat: Beat) -> bool:
        """A worker lives and has settled leases. False: it is unknown here and should register."""
        for lease_id in beat.settled:
            self._end(lease_id)
        view = self._workers.get(beat.worker_id)
        if view is None or view.incarnation != beat.incarnation:
            return False
        view.heard_s = self._now_s()
        view.state = beat.state
        return True

    def suspect(self, incarnation: str) -> None:
        """A client found this worker dead or stuck: no leases until it is heard from again."""
        for view in self._workers.values():
            if view.incarnation == incarnation:
                if self._leasable(view):  # its other callers say the same in a moment
                    logger.warning("%s is suspected dead", incarnation)
                view.suspect_until_s = self._now_s() + SUSPICION_S
                view.heard_s = float("-inf")
                self._drop_leases(view)

    def forget(self, worker_id: str) -> None:
        """The worker was taken out of the pool."""
        view = self._workers.pop(worker_id, None)
        self._reports.pop(worker_id, None)
        if view is not None:
            self._drop_leases(view)

    def members(self) -> list[Member]:
        """Every worker that has registered."""
        self.expire()
        members = []
        for view in self._workers.values():
            report = self._reports[view.worker_id]
            members.append(
                Member(
                    worker_id=view.worker_id,
                    incarnation=view.incarnation,
                    state=view.state,
                    error=report.error,
                    in_flight_ms=view.in_flight_ms,
                    num_leases=sum(held.worker is view for held in self._leases.values()),
                    leasable=self._leasable(view),
                    host=report.host,
                    gpu_uuid=report.gpu_uuid,
                )
            )
        return members

    # --- leases --------------------------------------------------------------------------------------------------

    def assign(self, requests: Sequence[LeaseRequest]) -> list[Lease | Refusal]:
        """A lease or a refusal for each request, in order."""
        self.expire()
        workers = [view for view in self._workers.values() if self._leasable(view)]
        return [self._assign(request, workers) for request in requests]

    def _assign(self, request: LeaseRequest, workers: Sequence[WorkerView]) -> Lease | Refusal:
        choice = assign(request.shape.grids, workers, self._rng, request.exclude)
        if not isinstance(choice, Choice):
            return choice
        view, quote = choice.worker, choice.quote
        self._next_lease += 1
        view.in_flight_ms += quote.cost_ms
        self._leases[self._next_lease] = _Held(view, quote.cost_ms)
        self._expiries.append((self._now_s() + self._lease_timeout_s, self._next_lease))
        return Lease(
            lease_id=self._next_lease,
            worker_id=view.worker_id,
            incarnation=view.incarnation,
            key=quote.key,
            cost_ms=quote.cost_ms,
        )

    def release(self, lease_ids: Sequence[int]) -> None:
        """Leases that a client will not use."""
        for lease_id in lease_ids:
            self._end(lease_id)

    def expire(self) -> None:
        """End the leases whose time is up."""
        now_s = self._now_s()
        while self._expiries and self._expiries[0][0] <= now_s:
            self._end(self._expiries.popleft()[1])

    def _leasable(self, view: WorkerView) -> bool:
        now_s = self._now_s()
        return (
            view.state is WorkerState.READY
            and now_s - view.heard_s < self._silent_timeout_s
            and now_s >= view.suspect_until_s
        )

    def _end(self, lease_id: int) -> None:
        held = self._leases.pop(lease_id, None)
        if held is not None:
            held.worker.in_flight_ms -= held.cost_ms
            if held.worker.in_flight_ms < 1e-6:  # rounding errors must not add up, or keep an idle worker "busy"
                held.worker.in_flight_ms = 0.0

    def _drop_leases(self, view: WorkerView) -> None:
        self._leases = {key: held for key, held in self._leases.items() if held.worker is not view}
        view.in_flight_ms = 0.0


class RouterActor(Router):
    """The router in a process of its own. Runs as a Ray actor without a GPU."""

    def __init__(self, encoder: EncoderConfig, *, lease_timeout_s: float, silent_timeout_s: float) -> None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # Ray leaves all of them visible to an actor that asked for none
        super().__init__(load_adapter(encoder), lease_timeout_s=lease_timeout_s, silent_timeout_s=silent_timeout_s)
