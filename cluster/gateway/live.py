"""What the live page shows: the pool's and the gateway's numbers as one JSON value, and the metrics as one text."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from typing import Any

from cluster.gateway.counters import Counters
from cluster.gateway.door import Door
from cluster.lifecycle.stats import PoolStats
from cluster.pool import EncoderPool
from encoder.errors import EncoderPoolError
from workers.messages import WorkerReport
from workers.prometheus import render

logger = logging.getLogger(__name__)

FRESH_S = 1.0  # pages that ask more often get the same answer
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"


class Watch:
    """Asks the pool once for all who watch. Belongs to the event loop."""

    def __init__(self, door: Door) -> None:
        self._door = door
        self._lock = asyncio.Lock()
        self._asked_s = float("-inf")
        self._pool: dict[str, Any] = {}
        self._dtypes: dict[str, str] = {}

    async def stats(self) -> dict[str, Any]:
        """Everything on the page."""
        door = self._door
        await self._look()
        return {
            "time_s": time.time(),
            "state": door.state,
            "model": None if door.pool is None else ", ".join(door.pool.config.encoders),
            "requests": door.recent.requests(),
            "in_flight": {
                "requests": door.room.num_requests,
                "items": door.room.num_items,
                "bytes": door.room.num_bytes,
            },
            "errors": door.recent.errors,
            "pool": self._pool,
        }

    async def dtypes(self) -> dict[str, str]:
        """The dtype of each model's tokens, as its workers say; several where they differ."""
        await self._look()
        return self._dtypes

    async def _look(self) -> None:
        pool = self._door.pool
        async with self._lock:
            if pool is None or time.monotonic() - self._asked_s <= FRESH_S:
                return
            try:
                stats = await asyncio.to_thread(pool.stats)
            except EncoderPoolError as error:
                self._pool = {**self._pool, "error": str(error)}
            else:
                self._pool = pool_stats(stats)
                self._dtypes |= dtypes_of(stats.reports)
            self._asked_s = time.monotonic()


def dtypes_of(reports: Iterable[WorkerReport]) -> dict[str, str]:
    """Of each model that a worker has loaded: the dtype that its name is followed by, or those of all its workers."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for report in reports:
        if report.encoder:
            found[report.model].add(report.encoder.rpartition("@")[2].partition("+")[0])
    return {model: ", ".join(sorted(dtypes)) for model, dtypes in found.items()}


def pool_stats(stats: PoolStats) -> dict[str, Any]:
    """The pool's part: sums, and each worker's graphs by axis keys and budget."""
    columns: dict[str, dict[str, Any]] = {}
    workers = []
    members = {member.worker_id: member for member in stats.members}
    reports = {report.worker_id: report for report in stats.reports}
    for worker_id in sorted(members.keys() | reports.keys(), key=_natural):
        member, report = members.get(worker_id), reports.get(worker_id)
        entry: dict[str, Any] = {
            "id": worker_id,
            "state": str(member.state) if member is not None else "unknown",
            "leasable": member is not None and member.leasable,
            "in_flight_ms": 0.0 if member is None else member.in_flight_ms,
        }
        if report is not None:
            entry |= worker_stats(report, columns)
        workers.append(entry)
    cache = stats.cache
    return {
        "num_workers": stats.num_workers,
        "num_ready": stats.num_ready,
        "num_items": stats.num_items,
        "hit_rate": stats.hit_rate,
        "fill": stats.fill,
        "misses": stats.segment_misses,
        "cache": {
            "hits": cache.hits,
            "joins": cache.joins,
            "misses": cache.misses,
            "evictions": cache.evictions,
            "entries": cache.num_entries,
            "used_bytes": cache.used_bytes,
            "max_bytes": cache.max_bytes,
        },
        "columns": sorted(columns.values(), key=lambda column: (_natural(column["axis"]), column["budget"])),
        "workers": workers,
    }


def worker_stats(report: WorkerReport, columns: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """One worker's part; the graphs it knows are added to `columns`, by name."""
    known = {str(view.key): view.key for view in (*report.known_graphs, *report.graphs)}
    held = {str(view.key) for view in report.graphs}
    cells: dict[str, dict[str, float | bool]] = {}
    for name in known.keys() | report.stats.graph_uses.keys():
        key = known.get(name)
        if key is None:
            continue
        axis = f"{key.encoder.partition('@')[0]} {key.path}: {', '.join(map(str, key.axis_keys))}"
        short = f"{axis}/{key.token_budget}"
        columns.setdefault(short, {"name": short, "axis": axis, "budget": key.token_budget})
        use = report.stats.graph_uses.get(name)
        cells[short] = {
            "held": name in held,
            "hits": 0 if use is None else use.segments,
            "replays": 0 if use is None else use.replays,
            "fill": use.useful_patches / use.run_patches if use is not None and use.run_patches else 0.0,
        }
    stats = report.stats
    return {
        "host": report.host,
        "device": report.device,
        "num_items": stats.num_items,
        "num_failed": stats.num_failed,
        "queue_ms": report.backlog_ms,
        "max_queue_ms": report.max_queue_ms,
        "fill": stats.fill,
        "hits": stats.segment_hits,
        "misses": sum(stats.segment_misses.values()),
        "graph_bytes": report.graph_bytes,
        "cells": cells,
    }


def metrics_text(pool: EncoderPool | None, counters: Counters) -> str:
    """The pool's metrics and the gateway's; the gateway's alone when the pool does not answer."""
    if pool is not None:
        try:
            return pool.metrics(counters.samples())
        except EncoderPoolError as error:
            logger.warning("the pool's metrics are missing: %s", error)
    return render(counters.samples())


@cache
def read_page() -> str:
    """The live page."""
    return files("cluster.gateway").joinpath("page.html").read_text(encoding="utf-8")


def _natural(text: str) -> list[tuple[bool, int, str]]:
    """worker-2 before worker-10."""
    parts = filter(None, re.split(r"(\d+)", text))
    return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts]
