"""`encpool bench pool`: a pool beside the bare engine, several workers beside one, one image alone, a killed worker."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cluster.benchmark.load import measure_kill, measure_latency, measure_throughput, pictures
from cluster.config import PoolConfig, parse_config
from cluster.notices import say
from cluster.pool import EncoderPool
from cluster.tables import aligned
from encoder.benchmark.files import two_panels
from encoder.config import EncoderConfig
from encoder.errors import WorkerStartError
from encoder.pictures import TRAFFIC_SIZES, Size

SINGLES: tuple[Size, ...] = ((448, 448), (640, 480), (1920, 1080))
CPU_SIZES: tuple[Size, ...] = ((448, 448), (640, 480), (336, 336), (500, 375))
ENGINE_TIMEOUT_S = 300.0


def bench_pool(config: PoolConfig, *, num_items: int, repeats: int, on_gpu: bool) -> dict[str, Any]:
    """All figures. Caches are off, and no two items are equal.

    Raises:
        WorkerStartError: the engine alone did not run; else what `EncoderPool.start` raises.
    """
    sizes = TRAFFIC_SIZES if on_gpu else CPU_SIZES
    files = pictures(sizes)
    say("measuring the engine alone ...")
    report: dict[str, Any] = {
        "model": config.worker.encoder.model,
        "date": time.strftime("%Y-%m-%d"),
        "engine": _bare_engine(config.worker.encoder, sizes),
        "throughput": [],
        "latency": [],
        "kill": None,
    }
    for num_workers in dict.fromkeys((1, config.num_workers)):
        say(f"measuring a pool of {num_workers} ...")
        with EncoderPool.start(_sized(config, num_workers)) as pool:
            measure_throughput(pool, files, max(len(files), num_items // 10))
            report["throughput"].append(asdict(measure_throughput(pool, files, num_items * num_workers)))
            if num_workers == 1:
                say("measuring one image alone ...")
                singles = SINGLES if on_gpu else SINGLES[:1]
                report["latency"] = [asdict(measure_latency(pool, size, repeats)) for size in singles]
            else:
                report["kill"] = asdict(measure_kill(pool, files, num_items * num_workers))
    return report


def _sized(config: PoolConfig, num_workers: int) -> PoolConfig:
    values = config.model_dump(exclude={"groups"})
    values["num_workers"] = num_workers
    values["worker"]["cache_bytes"] = 0
    return parse_config(values, source="bench pool")


def _bare_engine(encoder: EncoderConfig, sizes: Sequence[Size]) -> dict[str, Any]:
    """The engine without a pool, in a process of its own so that the device is free again afterwards."""
    task = json.dumps({"encoder": encoder.model_dump(mode="json"), "sizes": sizes})
    command = [sys.executable, "-m", "cluster.benchmark.bare_engine"]
    done = subprocess.run(command, input=task, stdout=subprocess.PIPE, text=True, timeout=ENGINE_TIMEOUT_S, check=False)
    if done.returncode:
        raise WorkerStartError(f"the engine alone ended with status {done.returncode}; its output is above")
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def table(report: dict[str, Any]) -> str:
    """The figures as text."""
    bare, engine = report["engine"], report["engine"]["segments_per_s"]
    one = report["throughput"][0]["segments_per_s"]
    header = ("saturated", "items/s", "segments/s", "to the engine", "to one worker", "hit rate", "fill", "GPU busy")
    rows = [("engine alone", "", f"{engine:.1f}", "1.00", "", "", f"{bare['fill']:.1%}", f"{bare['busy']:.1%}")]
    for run in report["throughput"]:
        workers, rate = run["num_workers"], run["segments_per_s"]
        rows.append(
            (
                f"{workers} worker{'s' * (workers > 1)}",
                f"{run['items_per_s']:.1f}",
                f"{rate:.1f}",
                f"{rate / engine:.2f}",
                f"{rate / one:.2f}",
                f"{run['hit_rate']:.1%}",
                f"{run['fill']:.1%}",
                f"{run['busy']:.1%}",
            )
        )
    parts = [aligned(header, rows, right=header[1:])]
    stages = list(dict.fromkeys(stage for alone in report["latency"] for stage in alone["stages_ms"]))
    columns = ("one image, ms", "total", *stages, "beyond decode and GPU", "no-op call", "ratio")
    lines = [
        (
            "x".join(map(str, alone["size"])),
            f"{alone['total_ms']:.2f}",
            *(f"{alone['stages_ms'].get(stage, 0.0):.2f}" for stage in stages),
            f"{alone['beyond_ms']:.2f}",
            f"{alone['noop_ms']:.2f}",
            f"{alone['ratio']:.1f}",
        )
        for alone in report["latency"]
    ]
    parts.append(aligned(columns, lines, right=columns[1:]))
    kill = report["kill"]
    if kill is not None:
        parts.append(
            f"a worker killed under load: {kill['num_on_board']} items were on board, the first was on its way to "
            f"another {kill['first_redispatch_s']:.2f} s later; of {kill['num_items']} items {kill['num_failed']} "
            f"failed, {kill['num_twice']} came twice"
        )
    return "\n\n".join(parts)


def write_plot(report: dict[str, Any], file: Path) -> None:
    """Throughput, and where one image's time goes. Raises ConfigError without matplotlib."""
    with two_panels(file, (11, 4.2)) as (_, left, right):
        names = ["engine alone", *(f"pool of {run['num_workers']}" for run in report["throughput"])]
        rates = [report["engine"]["segments_per_s"], *(run["segments_per_s"] for run in report["throughput"])]
        left.bar_label(left.bar(names, rates), fmt="{:.0f}", padding=2)
        left.set(ylabel="segments/s", title="Saturated")
        left.margins(y=0.12)
        sizes = ["x".join(map(str, alone["size"])) for alone in report["latency"]]
        start = [0.0] * len(sizes)
        for label, key in (("decode", "decode"), ("GPU", "replay")):
            widths = [alone["stages_ms"].get(key, 0.0) for alone in report["latency"]]
            right.barh(sizes, widths, left=start, height=0.5, label=label)
            start = [before + width for before, width in zip(start, widths, strict=True)]
        right.barh(sizes, [alone["beyond_ms"] for alone in report["latency"]], left=start, height=0.5, label="the rest")
        right.set(xlabel="ms", title="One image alone, from client to client", ylim=(-0.5, len(sizes) - 0.2))
        right.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 0.0), ncols=3)
        right.invert_yaxis()  # the legend has the strip below the last bar
