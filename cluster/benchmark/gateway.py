"""`encpool bench gateway`: the HTTP gateway beside the client inside the cluster, on the same pool in the same run.

The gateway runs in this process, its clients in another. One picture of 602 KB is asked for over and over: computed
each time, and, with the workers' cache on, found there, which leaves little but the way to the worker and back.
"""

from __future__ import annotations

import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from io import BytesIO
from pathlib import Path
from typing import Any

from cluster.benchmark.http_load import run_load
from cluster.config import PoolConfig
from cluster.gateway.threaded import GatewayThread
from cluster.lifecycle.processes import settle
from cluster.pool import EncoderPool
from cluster.tables import aligned
from encoder.benchmark.files import two_panels
from encoder.pictures import draw_picture

ROUNDS = 3  # of either client, in turn
CACHE_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """Both clients on one pool."""

    cached: bool
    pool_ms: float  # median of the client inside the cluster, one image after the other
    http_ms: float  # the same of a msgpack request
    pool_items_per_s: float  # saturated
    http_items_per_s: float  # over many connections

    @property
    def added(self) -> float:
        """What HTTP adds, in calls of the client inside."""
        return (self.http_ms - self.pool_ms) / self.pool_ms

    @property
    def share(self) -> float:
        """Of the throughput of the client inside."""
        return self.http_items_per_s / self.pool_items_per_s


def bench_gateway(
    config: PoolConfig, *, repeats: int, num_items: int, connections: int, num_requests: int
) -> dict[str, Any]:
    """All figures.

    Args:
        repeats: single images of either client.
        num_items: of either client, saturated; ten times as many from the cache.
        num_requests: that the memory is watched over.

    Raises:
        what `EncoderPool.start` raises, ConfigError when the gateway cannot listen.
    """
    picture = picture_bytes()
    report: dict[str, Any] = {
        "model": config.worker.encoder.model,
        "date": time.strftime("%Y-%m-%d"),
        "num_workers": config.num_workers,
        "picture_bytes": len(picture),
        "connections": connections,
        "num_cpus": os.cpu_count(),
        "versions": {name: version(name) for name in ("ray", "torch", "aiohttp")},
        "beside": [],
    }
    with tempfile.TemporaryDirectory(prefix="encpool-bench-") as folder:
        file = Path(folder) / "picture.bmp"
        file.write_bytes(picture)
        for cached in (False, True):
            worker = config.worker.model_copy(update={"cache_bytes": CACHE_BYTES if cached else 0})
            gateway = config.gateway.model_copy(update={"port": 0, "tokens_file": None, "requests_per_s": None})
            sized = config.model_copy(update={"worker": worker, "groups": ()})
            with EncoderPool.start(sized) as pool, GatewayThread(pool, gateway) as thread:
                settle()
                many = num_items * (10 if cached else 1)
                beside = measure_beside(
                    pool, thread.url, file, cached=cached, repeats=repeats, num_items=many, connections=connections
                )
                report["beside"].append({**asdict(beside), "added": beside.added, "share": beside.share})
                if cached:
                    report["memory"] = measure_memory(thread.url, file, connections=8, requests=num_requests)
    return report


def measure_beside(
    pool: EncoderPool, url: str, file: Path, *, cached: bool, repeats: int, num_items: int, connections: int
) -> Beside:
    """Either client alone, in turn, then either saturated, in turn."""
    picture = file.read_bytes()
    for _ in range(3):
        pool.encode(picture)
    run_load(url, file, connections=1, requests=3)
    pool_ms: list[float] = []
    http_ms: list[float] = []
    for _ in range(ROUNDS):
        for _ in range(max(1, repeats // ROUNDS)):
            started_s = time.perf_counter()
            pool.encode(picture)
            pool_ms.append((time.perf_counter() - started_s) * 1e3)
        http_ms += run_load(url, file, connections=1, requests=max(1, repeats // ROUNDS))["taken_ms"]
    pool_s, http_s = [], []
    each = max(connections, num_items // ROUNDS)
    for _ in range(ROUNDS):
        started_s = time.perf_counter()
        failed = [outcome.error for outcome in pool.encode_many(itertools.repeat(picture, each)) if outcome.error]
        pool_s.append(time.perf_counter() - started_s)
        loaded = run_load(url, file, connections=connections, requests=each)
        http_s.append(loaded["elapsed_s"])
        assert not failed, failed[0]
        assert loaded["statuses"] == {"200": each}, loaded["statuses"]
    return Beside(
        cached=cached,
        pool_ms=statistics.median(pool_ms),
        http_ms=statistics.median(http_ms),
        pool_items_per_s=each / statistics.median(pool_s),
        http_items_per_s=each / statistics.median(http_s),
    )


def measure_memory(url: str, file: Path, *, connections: int, requests: int, num_looks: int = 10) -> dict[str, Any]:
    """Bytes of this process, which holds the gateway, after each of so many equal parts of the requests."""
    own, part = [], max(1, requests // num_looks)
    for _ in range(num_looks):
        run_load(url, file, connections=connections, requests=part)
        own.append(own_bytes())
    return {"requests": num_looks * part, "own_bytes": own}


def own_bytes() -> int:
    """Memory of this process alone: without Ray's object store, pages of which count once they were touched."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


def picture_bytes() -> bytes:
    """A 448x448 BMP: many bytes that are decoded in no time and give one slice, so that the way there weighs most."""
    file = BytesIO()
    draw_picture(448, 448, 0).save(file, "BMP")
    return file.getvalue()


def table(report: dict[str, Any]) -> str:
    """The figures as text."""
    columns = ("", "inside, ms", "HTTP, ms", "added", "inside, items/s", "HTTP, items/s", "share")
    rows = [
        (
            "from the cache" if row["cached"] else "computed",
            f"{row['pool_ms']:.1f}",
            f"{row['http_ms']:.1f}",
            f"{row['added']:+.0%}",
            f"{row['pool_items_per_s']:.1f}",
            f"{row['http_items_per_s']:.1f}",
            f"{row['share']:.0%}",
        )
        for row in report["beside"]
    ]
    own = report["memory"]["own_bytes"]
    return (
        f"{report['model']} on {report['num_workers']} workers, {report['num_cpus']} cores, "
        f"a picture of {report['picture_bytes'] / 1e3:.0f} KB, {report['connections']} connections\n\n"
        f"{aligned(columns, rows, right=columns[1:])}\n\n"
        f"the process's own memory over {report['memory']['requests']:,} requests: "
        f"{' '.join(f'{value / 2**20:.0f}' for value in own)} MiB"
    )


def write_plot(report: dict[str, Any], file: Path) -> None:
    """Milliseconds and items a second of either client. Raises ConfigError without matplotlib."""
    with two_panels(file, (10, 3.6)) as (_, left, right):
        names = ["from the cache" if row["cached"] else "computed" for row in report["beside"]]
        _bars(left, names, [[row[key] for row in report["beside"]] for key in ("pool_ms", "http_ms")])
        left.set(ylabel="ms, median", title="One image alone")
        rates = [[row[key] for row in report["beside"]] for key in ("pool_items_per_s", "http_items_per_s")]
        _bars(right, names, rates)
        right.set(ylabel="items/s", title="Saturated")
        right.legend(frameon=False)


def _bars(axes: Any, names: Sequence[str], series: Sequence[Sequence[float]]) -> None:
    for place, (label, values) in enumerate(zip(("inside the cluster", "HTTP"), series, strict=True)):
        bars = axes.bar([index + 0.4 * place for index in range(len(names))], values, 0.38, label=label)
        axes.bar_label(bars, fmt="{:.0f}", padding=2)
    axes.set_xticks([index + 0.2 for index in range(len(names))], names)
