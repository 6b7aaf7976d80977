"""The Python API of encoding: sources in, outcomes out in the same order, whatever happens to workers on the way.

Each `encode_many` runs a `Stream` of its own (streams/ordered.py, streams/stream.py); what they share is the `Session`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable
from functools import partial

from cluster.config import PoolConfig
from cluster.planning.traces import TraceRecord, TraceWriter
from cluster.streams.options import read_scope, read_timeout
from cluster.streams.ordered import encode_in_order
from cluster.streams.outcomes import Embedding, Outcome
from cluster.streams.session import Session
from cluster.streams.sources import Source
from cluster.streams.transport import Transport
from encoder.adapters.registry import load_adapter
from encoder.errors import PoolClosedError
from workers.config import WorkerConfig
from workers.metrics import Meter
from workers.priority import Priority, read_priority


class Client(Session):
    """Encodes through a pool. Any number of threads may encode at once."""

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

        Raises:
            ConfigError: a timeout, priority or scope that is none.
            PoolClosedError: the pool is closed, or was while items were under way.
        """
        if self.closed:
            raise PoolClosedError("the pool is closed")
        outcomes = encode_in_order(
            self,
            sources,
            timeout_s=read_timeout(timeout_s),
            priority=read_priority(priority),
            scope=read_scope(scope),
        )
        return self._traced(outcomes)

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


def clients_of(
    config: PoolConfig,
    transport: Transport,
    *,
    num_workers: Callable[[], int],
    export: Callable[[Meter], object] = lambda meter: None,
) -> dict[str, Client]:
    """One for each model of the pool, in the order of its groups. They share all but the model.

    `export` tells others what they count, in one meter for all; it is called often.
    """
    workers: dict[str, WorkerConfig] = {}
    for group in config.worker_groups:
        workers.setdefault(group.worker.encoder.model, group.worker)
    (name, worker), *others = workers.items()
    own = config.model_copy(update={"worker": worker})
    first = Client(own, load_adapter(worker.encoder), transport, num_workers=num_workers, model=name)
    first.export = partial(export, first.meter)  # before the others, which are copies
    return {name: first} | {other: first.of(worker, load_adapter(worker.encoder)) for other, worker in others}
