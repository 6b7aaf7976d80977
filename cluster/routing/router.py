"""The router: remembers workers and leases, and hands out leases in batches. Pixels never come near it.

`Router` is a plain class; `RouterActor` is what runs as a Ray actor. Its state can be lost: workers report again.
"""

from __future__ import annotations

import logging
import os
import random
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from heapq import heappop, heappush
from itertools import count

from cluster.metrics import router_samples
from cluster.planning.traffic import Traffic
from cluster.routing.affinity import Homes, is_worth_it, seat_at_home
from cluster.routing.assign import Plan, Seat, WorkerView
from cluster.routing.desk import ModelDesk
from cluster.routing.leases import Answer, Ask, Lease, LeaseRequest, Refusal, pack, unpack
from cluster.routing.ledger import Ledger
from cluster.routing.quarantine import Quarantine
from cluster.routing.worker_index import WorkerIndex
from encoder.adapters.base import EncoderAdapter
from encoder.adapters.registry import load_adapter
from encoder.config import EncoderConfig
from encoder.travel import from_bytes, to_bytes
from encoder.types import Grid
from workers import spans
from workers.costs import CostTable
from workers.messages import Beat, ErrorNote, Heard, TracedItem, WorkerReport, WorkerState
from workers.priority import Priority
from workers.ray_metrics import RayExporter
from workers.samples import Sample

logger = logging.getLogger(__name__)

COUNT_EVERY_S = 2.0  # leases are counted by shape as often, at most
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


class Router:
    """Views, leases and in-flight cost. One thread at a time."""

    def __init__(
        self,
        adapter: EncoderAdapter,
        *,
        lease_timeout_s: float,
        silent_timeout_s: float,
        client_timeout_s: float = 10.0,
        others: Mapping[str, EncoderAdapter] | None = None,
        now_s: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        """`adapter` is the first model's; `others` are those of the pool's other models, by name."""
        self._silent_timeout_s = silent_timeout_s
        self._now_s = now_s
        self._rng = rng or random.Random()
        self._workers: dict[str, WorkerView] = {}
        self._reports: dict[str, WorkerReport] = {}
        self._first = ModelDesk(adapter, now_s=now_s, rng=self._rng)
        self._others = {model: ModelDesk(other, now_s=now_s, rng=self._rng) for model, other in (others or {}).items()}
        self._checks: list[tuple[float, int, WorkerView]] = []  # a heap: when time alone may change who is leasable
        self._check_numbers = count()
        self._next_checks: dict[str, int] = {}  # by worker id: number of its one check that still counts
        self._homes = Homes()
        self._count_at_s = float("-inf")
        self._draining: set[str] = set()  # workers that are being taken away
        self._ledger = Ledger(
            lease_timeout_s=lease_timeout_s,
            client_timeout_s=client_timeout_s,
            first_id=self._rng.getrandbits(48),  # a restarted router's ids never meet those of the one before
            now_s=now_s,
        )
        self._quarantine = Quarantine(now_s=now_s)

    def _desk(self, model: str) -> ModelDesk:
        """This model's; without a name, or with one that no other model has, the first one's."""
        return self._others.get(model, self._first)

    def _index(self, model: str) -> WorkerIndex:
        return self._desk(model).index

    # --- workers -------------------------------------------------------------------------------------------------

    def register(self, report: WorkerReport) -> None:
        """A worker is ready, holds other graphs than before, or could not start. A new incarnation starts empty."""
        adapter = self._desk(report.model).adapter
        costs = CostTable(
            report.graphs,
            axis_choices=adapter.axis_choices,
            measure=adapter.measure,
            eager_ms_per_patch=report.eager_ms_per_patch,
            eager_base_ms=report.eager_base_ms,
        )
        view = self._workers.get(report.worker_id)
        if view is not None:
            self._unlist(view)
        if view is None or view.incarnation != report.incarnation:
            view = self._workers[report.worker_id] = WorkerView(
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
        self._homes.open(report.worker_id, report.incarnation, report.cache_tokens)
        self._reports[report.worker_id] = report
        self._refresh(view)
        logger.info("%s is %s with %d graphs", report.incarnation, report.state, len(report.graphs))

    def beat(self, beat: Beat) -> Heard:
        """A worker lives, has settled leases, and tells what its segments ran in."""
        self._ledger.end(beat.settled)
        view = self._workers.get(beat.worker_id)
        if view is None:
            return Heard.UNKNOWN
        traffic = self._desk(view.model).traffic
        traffic.hear(beat)
        if view.incarnation != beat.incarnation:
            return Heard.UNKNOWN
        view.heard_s = self._now_s()
        is_listed = view in self._index(view.model) or beat.worker_id in self._draining
        if view.state is not beat.state or not is_listed:
            view.state = beat.state
            self._refresh(view)
        return Heard.TRACING if traffic.is_tracing else Heard.KNOWN

    def suspect(self, incarnation: str) -> None:
        """A client found this worker dead or stuck: no leases until it is heard from again."""
        for view in self._workers.values():
            if view.incarnation == incarnation:
                if view in self._index(view.model):  # its other callers say the same in a moment
                    logger.warning("%s is suspected dead", incarnation)
                    self._unlist(view)
                # Its leases go with the old view: they count nowhere from now on.
                self._workers[view.worker_id] = replace(
                    view,
                    in_flight_ms=0.0,
                    in_flight_bytes=0,
                    urgent_ms=0.0,
                    urgent_bytes=0,
                    heard_s=float("-inf"),
                    suspect_until_s=self._now_s() + SUSPICION_S,
                )
                return

    def drain(self, worker_id: str) -> None:
        """No more leases for this worker, whatever it reports, until it is forgotten."""
        self._draining.add(worker_id)
        view = self._workers.get(worker_id)
        if view is not None:
            self._refresh(view)

    def forget(self, worker_id: str) -> None:
        """The worker was taken out of the pool."""
        self._draining.discard(worker_id)
        view = self._workers.pop(worker_id, None)
        self._reports.pop(worker_id, None)
        self._next_checks.pop(worker_id, None)
        self._homes.close(worker_id)
        if view is not None:
            self._unlist(view)

    def _unlist(self, view: WorkerView) -> None:
        index = self._index(view.model)
        if view in index:
            index.remove(view)

    def _refresh(self, view: WorkerView) -> None:
        """List the worker if it may get leases, else not, and look again when time alone may change that."""
        now_s = self._now_s()
        ready = view.state is WorkerState.READY and view.worker_id not in self._draining
        silent_at_s = view.heard_s + self._silent_timeout_s
        if ready and view.suspect_until_s <= now_s < silent_at_s:
            index = self._index(view.model)
            if view not in index:
                index.add(view)
            check_s = silent_at_s
        else:
            self._unlist(view)
            check_s = view.suspect_until_s
        if ready and check_s > now_s:
            self._next_checks[view.worker_id] = number = next(self._check_numbers)
            heappush(self._checks, (check_s, number, view))

    def members(self) -> list[Member]:
        """Every worker that has registered."""
        self.expire()
        leases = self._ledger.counts()
        members = []
        for view in self._workers.values():
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
                    num_leases=leases[view],
                    leasable=view in self._index(view.model),
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
            for worker_id, view in self._workers.items()
            if worker_id not in self._draining and (model is None or self._desk(view.model) is self._desk(model))
        ]

    def refused(self) -> int:
        """Items for which no worker had room so far, each time they asked."""
        return self._ledger.num_refused

    # --- traffic -------------------------------------------------------------------------------------------------

    def traffic(self, model: str = "") -> Traffic:
        """Kinds of items that got leases for this model lately, and what became of their segments."""
        desk = self._desk(model)
        desk.count()
        return desk.traffic.traffic()

    def take_trace(self) -> tuple[TracedItem, ...]:
        """Of all models; see `TrafficLog.take_trace`."""
        return tuple(item for desk in self._desks() for item in desk.traffic.take_trace())

    def _desks(self) -> Iterator[ModelDesk]:
        yield self._first
        yield from self._others.values()

    def homes(self, digests: Sequence[int]) -> list[str | None]:
        """For each content the worker that probably has it in its cache."""
        return [self._homes.find(digest) for digest in digests]

    def samples(self) -> list[Sample]:
        """What it counts, as metrics."""
        return list(
            router_samples(
                self.members(),
                num_asked=self._ledger.num_asked,
                num_refused=self._ledger.num_refused,
                num_sent_home=self._homes.num_sent_home,
            )
        )

    # --- leases --------------------------------------------------------------------------------------------------

    def assign(
        self, requests: Sequence[LeaseRequest], *, priority: Priority = Priority.BATCH, client: str = ""
    ) -> list[Lease | Refusal]:
        """A lease or a refusal for each request, in order."""
        return unpack(self.lease(pack(requests, priority=priority, client=client)))

    def lease(self, ask: Ask) -> Answer:
        """The same as it travels."""
        with spans.SharedSpan("encpool.route", ask.traces):
            self.expire()
            home = partial(self._home, ask.model) if self._homes.any_open else None
            answer = self._ledger.lease(ask, self._index(ask.model).plan, home)
        news = self._quarantine.news(ask.edition)
        return answer if news is None else answer._replace(news=news)

    def _home(
        self, model: str, seat: Seat, digest: int, plan: Plan, grids: tuple[Grid, ...], exclude: Collection[str]
    ) -> Seat:
        """The seat chosen, or a cheaper one on the worker that has such content in its cache."""
        if not digest:
            return seat
        if model in self._others:  # what one model made of some content is at home apart from what others made of it
            digest ^= zlib.crc32(model.encode())
        home = self._workers.get(self._homes.find(digest) or "")
        if home is not None and home in self._index(model) and home.incarnation not in exclude:
            at_home = seat_at_home(plan, grids, home)
            if is_worth_it(at_home, seat):
                self._homes.num_sent_home += 1
                seat = at_home
        if not plan.num_tokens:
            plan.num_tokens = sum(self._desk(model).adapter.measure(grid).num_tokens for grid in grids)
        self._homes.note(digest, seat.worker.worker_id, plan.num_tokens)
        return seat

    def release(self, lease_ids: Sequence[int]) -> None:
        """Leases that a client will not use."""
        self._ledger.end(lease_ids)

    def expire(self) -> None:
        """End the leases whose time is up, and list no worker that has been silent for too long."""
        self._ledger.expire()
        now_s = self._now_s()
        if now_s >= self._count_at_s:
            self._count_at_s = now_s + COUNT_EVERY_S
            for desk in self._desks():
                desk.count()
        while self._checks and self._checks[0][0] <= now_s:
            _, number, view = heappop(self._checks)
            if self._workers.get(view.worker_id) is view and self._next_checks.get(view.worker_id) == number:
                self._refresh(view)

    # --- clients -------------------------------------------------------------------------------------------------

    def hello(self, client: str) -> None:
        """A client with items under way lives."""
        self._ledger.hear(client)

    def silent_clients(self, clients: Sequence[str]) -> list[str]:
        """Those of these clients that are to be given up: workers drop what they hold of them."""
        return self._ledger.silent(clients)

    def quarantine(self, left_s: Mapping[bytes, float]) -> None:
        """Content that workers died of, by digest, and how long to refuse it. All clients hear of it."""
        if self._quarantine.add(left_s):
            logger.warning("%d contents are in quarantine", len(self._quarantine))


class RouterActor(Router):
    """The router in a process of its own. Runs as a Ray actor without a GPU."""

    def __init__(
        self,
        encoders: Sequence[EncoderConfig],
        *,
        lease_timeout_s: float,
        silent_timeout_s: float,
        client_timeout_s: float,
    ) -> None:
        """`encoders`: one a model of the pool."""
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # Ray leaves all of them visible to an actor that asked for none
        first, *others = encoders
        super().__init__(
            load_adapter(first),
            others={encoder.model: load_adapter(encoder) for encoder in others},
            lease_timeout_s=lease_timeout_s,
            silent_timeout_s=silent_timeout_s,
            client_timeout_s=client_timeout_s,
        )
        spans.set_up("encpool-router")
        self._exporter = RayExporter()

    def ask(self, ask: bytes) -> bytes:
        """See `Router.lease`: an `Ask` and an `Answer`, as plain tuples."""
        return to_bytes(tuple(self.lease(Ask._make(from_bytes(ask)))))

    def hear(self, beat: bytes) -> int:
        """See `Router.beat`. They come at least once a second or so: the time to tell Ray the metrics."""
        self._exporter.export(self.samples)
        return int(self.beat(from_bytes(beat)))
