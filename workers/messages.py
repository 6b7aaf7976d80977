"""What crosses between a worker, its clients and the router. Encoded bytes one way, one array of tokens the other.

Free of torch: bfloat16 travels as the uint16 words it is made of.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from itertools import accumulate

import numpy as np

from encoder.errors import ERRORS, EncodeError, EncoderPoolError
from encoder.graph_use import GraphUse
from encoder.packing import GraphView
from encoder.travel import travels
from encoder.types import GraphKey, Grid, ItemShape
from workers.cache import CacheStats
from workers.priority import Priority
from workers.samples import Sample


class WorkerState(StrEnum):
    """Where a worker stands in its life."""

    STARTING = "starting"  # loading, capturing, probing
    READY = "ready"
    DRAINING = "draining"  # finishes what it has, takes nothing more
    CLOSED = "closed"
    FAILED = "failed"  # it could not start, or its device is lost; the error says why


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorNote:
    """An error as a name of `encoder.errors.ERRORS` and its message, for travel and for logs."""

    name: str
    message: str

    @classmethod
    def of(cls, error: BaseException, otherwise: type[EncoderPoolError] = EncodeError) -> ErrorNote:
        """Note any error; one from outside the tree becomes an `otherwise` and keeps its name in the message."""
        if isinstance(error, EncoderPoolError):
            return cls(name=type(error).__name__, message=str(error))
        return cls(name=otherwise.__name__, message=f"{type(error).__name__}: {error}")

    def to_error(self) -> EncoderPoolError:
        """The error, typed again."""
        return ERRORS.get(self.name, EncoderPoolError)(self.message)


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeItem:
    """One item of a call."""

    lease_id: int  # reported to the router when the item is settled, whatever became of it
    encoded: np.ndarray  # uint8: the bytes as they came; an array, so that pickle moves them out of band
    shape: ItemShape  # what the client's probe predicted
    timeout_s: float | None = None  # from arrival at the worker; None: no deadline
    scope: str | None = ""  # whose it is: the cache answers only what came under the same name; None: no cache for it


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class Loan:
    """A slab lent for one call: see slabs.py."""

    pid: int  # of the client
    fd: int  # of the slab there
    name: str  # that no other slab has
    num_bytes: int
    encoded: tuple[tuple[int, int], ...] | None  # first byte and end of each item's; None: they are in the call
    room_at: int  # from here to the end there is room for tokens


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeBatch:
    """One call to a worker."""

    call_id: str  # names the call for `cancel`
    items: tuple[EncodeItem, ...]
    priority: Priority = Priority.BATCH
    traces: tuple[str, ...] = ()  # context of each item's span at the caller, if any has one: see spans.py
    client: str = ""  # whose call it is; empty: of somebody who is never given up
    num_outputs: int = 0  # numbers that the tokens of all items have together, as their shapes predict; 0: unknown
    loan: Loan | None = None


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class ItemResult:
    """What became of one item. Its tokens are `num_tokens` rows of the call's array; none when it failed."""

    num_tokens: int
    graphs: tuple[str, ...]  # graphs that its segments ran in
    misses: tuple[str, ...]  # why segments of it ran eagerly
    timings_ms: dict[str, float]  # decode, wait, replay; cache where there is one: digest and look-up
    cached: bool = False  # no GPU time went into it: kept from before, or computed for an identical item just then
    error: ErrorNote | None = None


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeResult:
    """Answer to an `EncodeBatch`, item by item in its order."""

    worker_id: str
    dtype: str  # of the tokens: "float32", "float16" or "bfloat16"
    tokens_TE: np.ndarray  # rows of all items end to end; uint16 words when the dtype is bfloat16
    items: tuple[ItemResult, ...]
    reached: bool = False  # the worker has opened the slab that was lent for the call
    shared: tuple[int, int] | None = None  # rows and width of tokens that it left there; None: in `tokens_TE`

    @property
    def offsets(self) -> list[int]:
        """First row of each item, and the end."""
        return list(accumulate((item.num_tokens for item in self.items), initial=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStats:
    """Counts since the worker started."""

    num_items: int = 0
    num_failed: int = 0
    num_replays: int = 0
    num_eager_runs: int = 0
    eager_ms: float = 0.0  # that they took on the device
    segment_hits: int = 0
    segment_misses: dict[str, int] = field(default_factory=dict)  # by reason
    useful_patches: int = 0
    run_patches: int = 0  # padding included
    num_cached: int = 0  # items that cost no GPU time: hits and joins of the cache
    cache: CacheStats = field(default_factory=CacheStats)
    graph_uses: dict[str, GraphUse] = field(default_factory=dict)  # by graph, replays since the start
    capture_s: float = 0.0  # what capturing at the start took
    samples: tuple[Sample, ...] = ()  # what else was counted: times of stages, tokens

    @property
    def fill(self) -> float:
        """Useful rows over rows run."""
        return self.useful_patches / self.run_patches if self.run_patches else 0.0

    @property
    def device_ms(self) -> float:
        """Time that the device computed, in replays and eagerly."""
        return self.eager_ms + sum(use.real_ms for use in self.graph_uses.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedItem:
    """An item that was encoded, for a trace of the pool's traffic."""

    time_s: float  # since the epoch
    model: str  # as its adapter names it
    grids: tuple[Grid, ...]
    graphs: tuple[str, ...]  # graph keys that its segments ran in
    misses: tuple[str, ...]  # why segments of it ran eagerly
    ms: float  # from the first launch to the last landing


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """A worker's short report to the router: that it lives, and which leases it has settled."""

    worker_id: str
    incarnation: str
    state: WorkerState
    settled: tuple[int, ...]
    traced: tuple[TracedItem, ...] = ()  # since the last beat, while the router traces


class Heard(IntEnum):
    """What the router answers to a beat."""

    UNKNOWN = 0  # the worker should register
    KNOWN = 1
    TRACING = 2  # and tell of each item


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphChange:
    """How the latest change of a worker's graphs stands."""

    wanted: tuple[GraphKey, ...]
    done: bool
    failed: tuple[tuple[GraphKey, str], ...]  # those that could not be captured, and why


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """A worker as others see it. What has a default is known once it has loaded."""

    worker_id: str
    incarnation: str  # another one after each restart of the process
    state: WorkerState
    error: ErrorNote | None
    host: str
    pid: int
    model: str  # as the configuration names it
    max_queue_ms: float
    max_queue_bytes: int
    backlog_ms: float  # predicted work admitted and not finished
    backlog_bytes: int  # what it came as, and the patches of it that wait
    num_waiting: int  # segments decoded and not started
    device: str = ""
    gpu_uuid: str | None = None
    encoder: str = ""
    graphs: tuple[GraphView, ...] = ()
    eager_ms_per_patch: float = 0.0  # predicted, for work that no graph here takes
    failed_graphs: tuple[tuple[GraphKey, str], ...] = ()  # that could not be captured at the start, and why
    eager_base_ms: float = 0.0  # of an eager run, beside that
    eager_measured: bool = True  # False: both are a guess, and what a graph holds is replayed whatever it takes
    known_graphs: tuple[GraphView, ...] = ()  # every graph captured since the start, held or not
    graph_bytes: int = 0  # memory that the graphs take together
    graph_limit_bytes: int = 0  # and may take
    capture_ms: float = 0.0  # of a capture in traffic, on average; 0 before the first
    graph_change: GraphChange | None = None  # the latest one
    cost_error: float | None = None  # median |predicted - real| / real of the latest runs; None: too few
    stats: WorkerStats = field(default_factory=WorkerStats)
    cache_tokens: int = 0  # output rows that its cache has room for
