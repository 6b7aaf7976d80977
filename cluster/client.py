"""The Python API of encoding: sources in, outcomes out in the same order, whatever happens to workers on the way.

`Client` serves one pool and holds what its streams share; each `encode_many` runs a `Stream` of its own (ordered.py,
stream.py).
"""

# Shapes: T rows of an item, E width of a token.

from __future__ import annotations

import copy
import os
import time
import uuid
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import TYPE_CHECKING

import numpy as np

from cluster.config import PoolConfig
from cluster.planning.traces import TraceRecord, TraceWriter
from cluster.routing.leases import Lease, LeaseRequest, Refusal, pack, unpack
from cluster.streams.presence import Presence
from cluster.streams.transport import Transport
from cluster.streams.trials import Trials
from encoder.adapters.base import EncoderAdapter
from encoder.errors import (
    BadMediaError,
    EncoderPoolError,
    ItemError,
    MediaTooLargeError,
    PoolClosedError,
    kind_of,
)
from encoder.items import max_item_bytes, probe_item
from encoder.media import MediaHeader
from encoder.types import ItemShape
from workers import spans
from workers.config import WorkerConfig
from workers.metrics import Meter
from workers.priority import Priority, read_priority

if TYPE_CHECKING:
    import torch

HELLOS_PER_TIMEOUT = 5

Source = str | os.PathLike[str] | bytes | bytearray | memoryview
"""A path, or the encoded bytes themselves."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Embedding:
    """What the encoder made of one item."""

    tokens: torch.Tensor  # [num_tokens, hidden], on the CPU, with memory of its own
    shape: ItemShape
    graphs: tuple[str, ...]  # graphs that its segments ran in
    misses: tuple[str, ...]  # why segments of it ran eagerly, if any did
    timings: dict[str, float]  # milliseconds: cache, decode, wait, replay at the worker; call, total at the client
    note: str | None  # about the media, such as "first of 12 frames"
    worker: str
    cached: bool = False  # no GPU time went into it: kept from before, or computed for an identical item just then


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """One source's end: an embedding or an error."""

    source: Source
    embedding: Embedding | None
    error: EncoderPoolError | None


class Client:
    """Encodes through a pool. Any number of threads may encode at once."""

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
            lambda: transport.hello(self.client_id), interval_s=config.client_timeout_s / HELLOS_PER_TIMEOUT
        )

    def of(self, worker: WorkerConfig, adapter: EncoderAdapter) -> Client:
        """A client of the same pool for the model that this worker section names; it shares all but the model."""
        other = copy.copy(self)
        other.config = self.config.model_copy(update={"worker": worker})
        other.adapter, other.model = adapter, worker.encoder.model
        return other

    def encode(
        self,
        source: Source,
        *,
        timeout_s: float | None = None,
        priority: str = Priority.INTERACTIVE,
        scope: str | None = "",
    ) -> Embedding:
        """Encode one image. Raises its typed error."""
        (outcome,) = self.encode_many([source], timeout_s=timeout_s, priority=priority, scope=scope)
        if outcome.error is not None:
            raise outcome.error
        assert outcome.embedding is not None
        return outcome.embedding

    def encode_many(
        self,
        sources: Iterable[Source],
        *,
        timeout_s: float | None = None,
        priority: str = Priority.BATCH,
        scope: str | None = "",
    ) -> Generator[Outcome, None, None]:
        """Encode images as they come and hand out the outcomes in the same order.

        Work goes on while the caller asks for outcomes; at most `PoolConfig.window` are read ahead. A source that
        fails is an outcome with an error; only a closed pool raises. Closing the iterator early drops what is queued.

        Args:
            timeout_s: deadline of each item, from the moment it is read.
            priority: "interactive" items pass "batch" items that wait, for as long as `batch_patience_s` of the
                workers says.
            scope: whose they are: the workers' caches answer them only with what came under the same name. None: they
                are encoded anew, and not kept.
        """
        from cluster.streams.ordered import encode_in_order

        if self.closed:
            raise PoolClosedError("the pool is closed")
        outcomes = encode_in_order(self, sources, timeout_s=timeout_s, priority=read_priority(priority), scope=scope)
        yield from self._traced(outcomes)

    def _traced(self, outcomes: Generator[Outcome, None, None]) -> Generator[Outcome, None, None]:
        """The same outcomes, noted in the configured trace file."""
        if self.config.trace_file is None:
            yield from outcomes
            return
        with TraceWriter(self.config.trace_file) as trace:
            for outcome in outcomes:
                if outcome.embedding is not None and not outcome.embedding.cached:  # graphs never saw those
                    trace.write(
                        TraceRecord(
                            time_s=time.time(),
                            model=self.adapter.encoder,
                            grids=outcome.embedding.shape.grids,
                            graphs=outcome.embedding.graphs,
                            misses=outcome.embedding.misses,
                            ms=outcome.embedding.timings["replay"],
                        )
                    )
                yield outcome

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


def read_source(source: Source, max_bytes: int) -> bytes:
    """The encoded bytes of a path, or those given. A file over the limit is refused unread."""
    if isinstance(source, bytes):
        return source
    if isinstance(source, bytearray | memoryview):
        return bytes(source)
    try:
        path = Path(source)
        status = path.stat()
        if not S_ISREG(status.st_mode):  # a pipe or a device may have no end
            raise BadMediaError(f"{path} cannot be read: it is a folder, a pipe or a device; name a file")
        if status.st_size > max_bytes:
            raise MediaTooLargeError(
                f"{path} has {status.st_size} bytes, the limit is {max_bytes}; "
                f"send it smaller or raise encoder.max_bytes"
            )
        return path.read_bytes()
    except ItemError:
        raise
    except TypeError as error:
        raise BadMediaError(f"a source is a path or a file's bytes, got {kind_of(source)}") from error
    except (OSError, ValueError) as error:  # ValueError: a path with a null byte
        reason = getattr(error, "strerror", None) or str(error)
        raise BadMediaError(f"{source} cannot be read: {reason}") from error
