"""The router: remembers workers and leases, and hands out leases in batches. Pixels never come near it.

`Router` is a plain class; `RouterActor` is what runs as a Ray actor. Its state can be lost: workers report again.
"""

from __future__ import annotations

import logging
import random
import time
import zlib
from collections.abc import Callable, Mapping, Sequence

from cluster.lifecycle.processes import settle
from cluster.routing.affinity import Homes, homing
from cluster.routing.assign import Home
from cluster.routing.leases import Answer, Ask, Lease, LeaseRequest, Refusal, pack, unpack
from cluster.routing.ledger import Ledger
from cluster.routing.quarantine import Quarantine
from cluster.routing.roster import Member, Roster
from cluster.routing.samples import router_samples
from encoder.adapters.base import EncoderAdapter
from encoder.adapters.registry import load_adapter
from encoder.config import EncoderConfig
from encoder.travel import from_bytes, to_bytes
from workers import spans
from workers.messages import Beat, Heard, TracedItem, WorkerReport
from workers.priority import Priority
from workers.process import set_up_process
from workers.ray_metrics import RayExporter
from workers.samples import Sample

logger = logging.getLogger(__name__)

COUNT_EVERY_S = 2.0  # leases are counted by shape as often, at most


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
        rng = rng or random.Random()
        self._now_s = now_s
        self.roster = Roster(adapter, others or {}, silent_timeout_s=silent_timeout_s, now_s=now_s, rng=rng)
        self._salts = {model: zlib.crc32(model.encode()) for model in others or {}}
        self._homes = Homes()
        self._count_at_s = float("-inf")
        self._ledger = Ledger(
            lease_timeout_s=lease_timeout_s,
            client_timeout_s=client_timeout_s,
            first_id=rng.getrandbits(48),  # a restarted router's ids never meet those of the one before
            now_s=now_s,
        )
        self._quarantine = Quarantine(now_s=now_s)

    # --- workers -------------------------------------------------------------------------------------------------

    def register(self, report: WorkerReport) -> None:
        """A worker is ready, holds other graphs than before, or could not start. A new incarnation starts empty."""
        self._ledger.drop(self.roster.register(report))
        self._homes.open(report.worker_id, report.incarnation, report.cache_tokens)

    def beat(self, beat: Beat) -> Heard:
        """A worker lives, has settled leases, and tells of items that ended, for a trace."""
        self._ledger.end(beat.settled)
        view = self.roster.views.get(beat.worker_id)
        if view is None:
            return Heard.UNKNOWN
        traffic = self.roster.desk(view.model).traffic
        traffic.hear(beat.traced)
        if not self.roster.hear(beat):
            return Heard.UNKNOWN
        return Heard.TRACING if traffic.is_tracing else Heard.KNOWN

    def suspect(self, incarnation: str) -> None:
        """A client found this worker dead or stuck: no leases until it is heard from again."""
        self._ledger.drop(self.roster.suspect(incarnation))

    def drain(self, worker_id: str) -> None:
        """No more leases for this worker, whatever it reports, until it is forgotten."""
        self.roster.drain(worker_id)

    def forget(self, worker_id: str) -> None:
        """The worker was taken out of the pool."""
        self._ledger.drop(self.roster.forget(worker_id))
        self._homes.close(worker_id)

    def members(self) -> list[Member]:
        """Every worker that has registered."""
        self.expire()
        return self.roster.members(self._ledger.counts())

    def worker_ids(self, model: str | None = None) -> list[str]:
        """Those that have registered and are to stay: all of them, or those with one model ("": the first one)."""
        return self.roster.worker_ids(model)

    def refused(self) -> int:
        """Items for which no worker had room so far, each time they asked."""
        return self._ledger.num_refused

    # --- traffic -------------------------------------------------------------------------------------------------

    def traffic(self, model: str = "") -> bytes:
        """Kinds of items that got leases for this model lately: `TrafficHistogram.to_bytes`."""
        desk = self.roster.desk(model)
        desk.count()
        return desk.traffic.histogram.to_bytes()

    def take_trace(self, recorder: str) -> tuple[TracedItem, ...]:
        """Of all models; see `TrafficLog.take_trace`."""
        return tuple(item for desk in self.roster.desks() for item in desk.traffic.take_trace(recorder))

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
            desk = self.roster.desk(ask.model)
            plans = [desk.index.plan(grids) for grids in ask.shapes] if len(desk.index) else []
            answer = self._ledger.lease(ask, plans, desk.shares[ask.priority], self._home(ask.model))
        news = self._quarantine.news(ask.edition)
        return answer if news is None else answer._replace(news=news)

    def _home(self, model: str) -> Home | None:
        if not self._homes.any_open:
            return None
        return homing(self._homes, self.roster.desk(model), self.roster.views, self._salts.get(model, 0))

    def release(self, lease_ids: Sequence[int]) -> None:
        """Leases that a client will not use."""
        self._ledger.end(lease_ids)

    def expire(self) -> None:
        """End the leases whose time is up, and list no worker that has been silent for too long."""
        self._ledger.expire()
        now_s = self._now_s()
        if now_s >= self._count_at_s:
            self._count_at_s = now_s + COUNT_EVERY_S
            for desk in self.roster.desks():
                desk.count()
        self.roster.check()

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
        set_up_process("encpool-router")
        first, *others = encoders
        super().__init__(
            load_adapter(first),
            others={encoder.model: load_adapter(encoder) for encoder in others},
            lease_timeout_s=lease_timeout_s,
            silent_timeout_s=silent_timeout_s,
            client_timeout_s=client_timeout_s,
        )
        self._exporter = RayExporter()
        settle()  # a full collection of what Ray loads stops all routing for a tenth of a second

    def ask(self, ask: bytes) -> bytes:
        """See `Router.lease`: an `Ask` and an `Answer`, as plain tuples."""
        return to_bytes(tuple(self.lease(Ask._make(from_bytes(ask)))))

    def hear(self, beat: bytes) -> int:
        """See `Router.beat`. They come at least once a second or so: the time to tell Ray the metrics."""
        self._exporter.export(self.samples)
        return int(self.beat(from_bytes(beat)))
