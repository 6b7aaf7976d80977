"""What the pool bench sends, and what it measures of one running pool: throughput, one image alone, a killed worker."""

from __future__ import annotations

import io
import math
import os
import signal
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from cluster.notices import say
from cluster.pool import EncoderPool
from cluster.streams.transport import Transport
from encoder.errors import ConfigError
from encoder.pictures import Size, draw_picture
from workers.messages import EncodeBatch, WorkerReport

KILL_AFTER = 0.3  # of the items were sent


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """A saturated run. Rates are those of its middle, when all queues are full."""

    num_workers: int
    items_per_s: float
    segments_per_s: float
    hit_rate: float
    fill: float
    busy: float  # share of the time that the devices computed


@dataclass(frozen=True, kw_only=True)
class Latency:
    """One image alone, medians in milliseconds."""

    size: Size
    total_ms: float
    stages_ms: dict[str, float]  # what the worker and the client measured of it
    beyond_ms: float  # total less decoding and GPU
    noop_ms: float  # a call of an actor that returns at once, in turns with the images
    ratio: float  # of the two before


@dataclass(frozen=True, kw_only=True)
class Kill:
    """A worker killed under load."""

    num_on_board: int  # items it took to the grave
    first_redispatch_s: float  # from the kill until one of them is on its way to another worker
    num_items: int
    num_failed: int
    num_twice: int  # outcomes for a source that already had one


def pictures(sizes: Sequence[Size]) -> list[bytes]:
    """JPEGs of these sizes."""
    files = []
    for seed, (width, height) in enumerate(sizes):
        buffer = io.BytesIO()
        draw_picture(width, height, seed).save(buffer, "JPEG", quality=90)
        files.append(buffer.getvalue())
    return files


def different(files: Sequence[bytes]) -> Iterator[bytes]:
    """The files again and again, each time with other bytes after the picture: no cache has seen them before."""
    number = 0
    while True:
        for file in files:
            yield file + number.to_bytes(8, "big")
            number += 1


def measure_throughput(pool: EncoderPool, files: Sequence[bytes], num_items: int) -> Throughput:
    """Saturate the pool with `num_items` items that all differ."""
    before, began_s = pool.stats(), time.perf_counter()
    # While the window fills and empties, and the clocks of a cold chip fall, rates are others. Outcomes come in the
    # order of the items, in bursts, so what workers ran is counted, not what came back.
    first = num_items // 4
    last = num_items - 1 - min(pool.config.window(before.num_workers), first)
    num_segments, middle = 0, []
    for number, outcome in enumerate(pool.encode_many(islice(different(files), num_items))):
        if outcome.error is not None:
            raise outcome.error
        assert outcome.embedding is not None
        num_segments += len(outcome.embedding.shape.grids)
        if number in (first, last):
            middle.append((pool.stats(), time.perf_counter()))
    after, ended_s = pool.stats(), time.perf_counter()
    (start, start_s), (end, end_s) = middle
    if start.num_segments == end.num_segments:  # too few items for a middle
        start, start_s, end, end_s = before, began_s, after, ended_s
    middle_s = end_s - start_s
    rate = (end.num_segments - start.num_segments) / middle_s
    shares = after.rates_since(before)
    return Throughput(
        num_workers=after.num_workers,
        items_per_s=rate * num_items / num_segments,
        segments_per_s=rate,
        hit_rate=shares.hit_rate or 0.0,
        fill=shares.fill or 0.0,
        busy=(end.device_ms - start.device_ms) / 1e3 / middle_s / after.num_workers,
    )


class _Nothing:
    def nothing(self) -> None:
        """Returns at once."""


def measure_latency(pool: EncoderPool, size: Size, repeats: int) -> Latency:
    """One image at a time, and between them a call of an actor that does nothing."""
    import ray

    remote: Any = ray.remote(_Nothing).options(num_cpus=0)
    nothing = remote.remote()
    files = different(pictures([size]))
    stages: dict[str, list[float]] = {}
    noop_ms = []
    beyond_ms = []
    try:
        for number in range(repeats + 5):
            embedding = pool.encode(next(files))
            started_s = time.perf_counter()
            ray.get(nothing.nothing.remote())
            if number < 5:  # the first ones make connections
                continue
            noop_ms.append((time.perf_counter() - started_s) * 1e3)
            for stage, ms in embedding.timings.items():
                stages.setdefault(stage, []).append(ms)
            timings = embedding.timings
            beyond_ms.append(timings["total"] - timings.get("decode", 0.0) - timings["replay"])
    finally:
        ray.kill(nothing)
    medians = {stage: statistics.median(times) for stage, times in stages.items()}
    beyond, noop = statistics.median(beyond_ms), statistics.median(noop_ms)
    total = medians.pop("total")
    return Latency(size=size, total_ms=total, stages_ms=medians, beyond_ms=beyond, noop_ms=noop, ratio=beyond / noop)


class _Watched:
    """A transport that notes when which items went where. Items are known by where their bytes lie."""

    def __init__(self, transport: Transport, victim: WorkerReport, kill_after: int) -> None:
        """The victim is killed with the first call to it that comes when so many items were sent."""
        self._transport = transport
        self._victim = victim
        self._kill_after = kill_after
        self.sent: list[tuple[float, str, frozenset[int]]] = []
        self.killed_s = math.inf

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def start(self, worker_id: str, batch: EncodeBatch) -> Any:
        places = frozenset(int(item.encoded.__array_interface__["data"][0]) for item in batch.items)
        self.sent.append((time.perf_counter(), worker_id, places))
        call = self._transport.start(worker_id, batch)
        num_sent = sum(len(places) for _, _, places in self.sent)
        if self.killed_s == math.inf and worker_id == self._victim.worker_id and num_sent >= self._kill_after:
            self.killed_s = time.perf_counter()
            os.kill(self._victim.pid, signal.SIGKILL)
        return call


def measure_kill(pool: EncoderPool, files: Sequence[bytes], num_items: int) -> Kill:
    """Kill one worker's process while the pool is saturated.

    Raises:
        ConfigError: the pool has one worker, or none of them on this machine.
    """
    import socket

    here = [report for report in pool.stats().reports if report.host == socket.gethostname()]
    if len(here) < 2:
        raise ConfigError("a worker can be killed under load where two of them run on this machine")
    victim = here[0]
    say(f"killing {victim.worker_id} under load, which Ray warns of")
    client, transport = pool.client, pool.client.transport
    watched = client.transport = _Watched(transport, victim, int(KILL_AFTER * num_items))
    sources = list(islice(different(files), num_items))
    num_failed, seen = 0, set[int]()
    num_twice = 0
    try:
        for outcome in client.encode_many(sources):
            num_failed += outcome.error is not None
            num_twice += id(outcome.source) in seen
            seen.add(id(outcome.source))
    finally:
        client.transport = transport
    killed_s = watched.killed_s
    before = [
        places for sent_s, worker_id, places in watched.sent if sent_s < killed_s and worker_id == victim.worker_id
    ]
    on_board = frozenset().union(*before)
    again = [
        (sent_s, places & on_board)
        for sent_s, worker_id, places in watched.sent
        if sent_s > killed_s and worker_id != victim.worker_id and places & on_board
    ]
    return Kill(
        num_on_board=len(frozenset().union(*(places for _, places in again))),
        first_redispatch_s=again[0][0] - killed_s if again else float("nan"),
        num_items=len(seen),
        num_failed=num_failed,
        num_twice=num_twice,
    )
