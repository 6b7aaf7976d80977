"""`Session`: what all streams of one client share: the way to the pool, what it knows of it, and what it counts."""

from __future__ import annotations

import copy
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Self

import numpy as np

from cluster.config import PoolConfig
from cluster.routing.leases import Lease, LeaseRequest, Refusal, pack, unpack
from cluster.streams.presence import Presence
from cluster.streams.slabs import IDLE_S
from cluster.streams.sources import Source, read_source
from cluster.streams.transport import Transport
from cluster.streams.trials import Trials
from encoder.adapters.base import EncoderAdapter
from encoder.items import max_item_bytes, probe_item
from encoder.media import MediaHeader
from encoder.types import ItemShape
from workers import spans
from workers.config import WorkerConfig
from workers.metrics import Meter
from workers.priority import Priority

HELLOS_PER_TIMEOUT = 5


class Session:
    """One client's use of a pool, for one of its models. Any thread may open streams."""

    def __init__(
        self,
        config: PoolConfig,
        adapter: EncoderAdapter,
        transport: Transport,
        *,
        num_workers: Callable[[], int],
        model: str = "",
    ) -> None:
        """`model` is the name of one of the pool's models; without one, the first."""
        self.config = config
        self.model = model
        self.adapter = adapter
        self.transport = transport
        self.num_workers = num_workers
        self.says_content = config.caches  # to the router; looked up once, as each image alone opens a stream
        self.closed = False
        self.meter = Meter("client")
        self.export: Callable[[], object] = lambda: None  # tells others what the meter counted; called often
        self.client_id = uuid.uuid4().hex
        self.trials = Trials(quarantine_s=config.quarantine_s, tell=transport.quarantine)
        self.presence = Presence(
            lambda: transport.hello(self.client_id),
            interval_s=config.client_timeout_s / HELLOS_PER_TIMEOUT,
            linger_s=2 * IDLE_S,
        )

    def of(self, worker: WorkerConfig, adapter: EncoderAdapter) -> Self:
        """One of the same pool for the model that this worker section names; it shares all but the model."""
        other = copy.copy(self)
        other.config = self.config.model_copy(update={"worker": worker})
        other.adapter, other.model = adapter, worker.encoder.model
        return other

    def assign(
        self, requests: Sequence[LeaseRequest], priority: Priority, *, traces: Sequence[str] = ()
    ) -> list[Lease | Refusal]:
        """A lease or a refusal for each request; on the way the router's quarantine is heard.

        `traces`: what each item's owner is doing, if anybody traces.
        """
        asked_s = time.monotonic()
        with spans.SharedSpan("encpool.lease", traces) as here:
            ask = pack(
                requests,
                priority=priority,
                client=self.client_id,
                edition=self.trials.heard,
                traces=here,
                model=self.model,
            )
            answer = self.transport.lease(ask)
        self.meter.observe("encpool_stage_seconds", "route", value=time.monotonic() - asked_s)
        self.trials.hear(answer.news)
        return unpack(answer)

    def read(self, source: Source) -> tuple[np.ndarray, MediaHeader, ItemShape]:
        """Load a source once and probe its header. Raises BadMediaError, MediaTooLargeError or PoisonItemError."""
        limits = self.config.worker.encoder
        data = read_source(source, max_item_bytes(self.adapter, limits))
        started_s = time.monotonic()
        header, shape = probe_item(data, self.adapter, limits)
        self.meter.observe("encpool_stage_seconds", "probe", value=time.monotonic() - started_s)
        encoded = np.frombuffer(data, dtype=np.uint8)
        self.trials.refuse_poison(encoded)
        return encoded, header, shape
