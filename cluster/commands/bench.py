"""`encpool bench`: measure the engine, the router, a pool, its gateway, or a worker that changes its graphs."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from cluster.commands.arguments import DEFAULT_MODEL, DTYPES, FAILED, OK, lay_over, positive
from cluster.notices import say

if TYPE_CHECKING:
    from cluster.commands.arguments import Commands
    from encoder.benchmark.rows import Report as EngineReport
    from encoder.config import EncoderConfig

Report = TypeVar("Report", dict[str, Any], "EngineReport")


def add(commands: Commands) -> None:
    """Declare the command and its subjects."""
    bench = commands.add_parser("bench", help="measure")
    subjects = bench.add_subparsers(title="subjects", metavar="SUBJECT", required=True)
    engine = subjects.add_parser("engine", help="one engine on one device beside its baselines, without a pool")
    engine.add_argument("--config", type=Path, metavar="FILE", help="a pool's YAML configuration; options win over it")
    engine.add_argument(
        "--model",
        action="append",
        metavar="NAME|DIR",
        help=f"(default: {DEFAULT_MODEL}); given several times, one model after another, and their ratios side by side",
    )
    engine.add_argument("--dtype", choices=DTYPES, help="(default: auto)")
    engine.add_argument("--device", metavar="NAME", help="cuda:0, cpu (default: the first GPU, or the CPU)")
    engine.add_argument("--repeats", type=positive, default=5, metavar="N", help="(default: %(default)s)")
    engine.add_argument(
        "--only", action="append", default=[], metavar="TEXT", help="workloads whose names hold this, such as alone"
    )
    _add_files(engine)
    engine.set_defaults(run=run_engine)
    router = subjects.add_parser("router", help="routing decisions: how fast, and what they are worth; needs no GPU")
    router.add_argument("--no-ray", action="store_true", help="leave out the router actor")
    _add_files(router)
    router.set_defaults(run=run_router)
    pool = subjects.add_parser(
        "pool", help="a pool beside the bare engine: throughput, one image alone, a killed worker"
    )
    pool.add_argument("--config", type=Path, metavar="FILE", help="a pool's YAML configuration; options win over it")
    pool.add_argument("--model", metavar="NAME|DIR", help=f"(default: {DEFAULT_MODEL})")
    pool.add_argument(
        "--workers", type=positive, metavar="N", help="measured beside one (default: one per GPU, or two)"
    )
    pool.add_argument("--items", type=positive, metavar="N", help="items per worker (default: 1000, on CPUs 100)")
    pool.add_argument("--repeats", type=positive, default=50, metavar="N", help="single images (default: %(default)s)")
    _add_files(pool)
    pool.set_defaults(run=run_pool)

    gateway = subjects.add_parser("gateway", help="HTTP beside the client inside the cluster, on the same pool")
    gateway.add_argument("--config", type=Path, metavar="FILE", help="a pool's YAML configuration")
    gateway.add_argument(
        "--repeats", type=positive, default=60, metavar="N", help="single images (default: %(default)s)"
    )
    gateway.add_argument("--items", type=positive, default=384, metavar="N", help="saturated (default: %(default)s)")
    gateway.add_argument("--connections", type=positive, default=64, metavar="N", help="at once (default: %(default)s)")
    gateway.add_argument(
        "--requests", type=positive, default=10_000, metavar="N", help="to watch the memory over (default: %(default)s)"
    )
    _add_files(gateway)
    gateway.set_defaults(run=run_gateway)

    change = subjects.add_parser("change", help="one saturated worker while it changes its graphs, without a pool")
    change.add_argument("--config", type=Path, metavar="FILE", help="a pool's YAML configuration; options win over it")
    change.add_argument("--model", metavar="NAME|DIR", help=f"(default: {DEFAULT_MODEL})")
    change.add_argument("--repeats", type=positive, default=3, metavar="N", help="(default: %(default)s)")
    _add_files(change)
    change.set_defaults(run=run_change)


def _add_files(subject: argparse.ArgumentParser) -> None:
    subject.add_argument("--json", type=Path, metavar="FILE", help="write the figures here as well")
    subject.add_argument("--plot", type=Path, metavar="FILE", help="and draw them here (needs encpool[bench])")


def run_engine(parsed: argparse.Namespace) -> int:
    """Measure the engine, of one model or of several."""
    import torch

    from cluster.config import load_config
    from encoder.benchmark.engine import bench_engine
    from encoder.benchmark.report import table, write_plot
    from encoder.config import EncoderConfig

    device = parsed.device or ("cuda:0" if torch.cuda.is_available() else "cpu")
    config = load_config(parsed.config).worker.encoder if parsed.config else EncoderConfig(model=DEFAULT_MODEL)
    if parsed.dtype is not None:
        config = config.model_copy(update={"dtype": parsed.dtype})
    configs = [config.model_copy(update={"model": model}) for model in parsed.model or [config.model]]
    if len(configs) > 1:
        return _run_engines(configs, device, parsed)
    report = bench_engine(configs[0], device, repeats=parsed.repeats, only=parsed.only)
    return _show(report, parsed, table, write_plot)


def _run_engines(configs: list[EncoderConfig], device: str, parsed: argparse.Namespace) -> int:
    """Measure several models. What is measured is shown and written as it comes, whatever becomes of the rest."""
    from encoder.benchmark.engine import bench_engines
    from encoder.benchmark.report import table as table_of_one
    from encoder.benchmark.sweep import table, write_json, write_plot

    reports: list[EngineReport] = []
    failed: list[str] = []
    for model, report in bench_engines(configs, device, repeats=parsed.repeats, only=parsed.only):
        if report is None:
            failed.append(model)
            continue
        print(table_of_one(report), end="\n\n", flush=True)
        reports.append(report)
        if parsed.json is not None:
            write_json(reports, parsed.json)
    print(table(reports))
    if parsed.plot is not None:
        write_plot(reports, parsed.plot)
    if failed:
        say(f"error: no figures of {', '.join(failed)}; see above")
    return FAILED if failed else OK


def run_router(parsed: argparse.Namespace) -> int:
    """Measure routing decisions."""
    from cluster.benchmark.router import bench_router, table, write_plot

    report = bench_router(with_ray=not parsed.no_ray)
    return _show(report, parsed, table, write_plot)


def run_pool(parsed: argparse.Namespace) -> int:
    """Measure a pool."""
    import torch

    from cluster.benchmark.pool import bench_pool, table, write_plot
    from cluster.config import load_config, parse_config

    num_gpus = torch.cuda.device_count()
    values: dict[str, Any] = {"worker": {"encoder": {"model": DEFAULT_MODEL}}, "num_workers": num_gpus or 2}
    if parsed.config is not None:
        values = load_config(parsed.config).model_dump()
    lay_over(values, model=parsed.model)
    if parsed.workers is not None:
        values["num_workers"] = parsed.workers
    config = parse_config(values, source="bench pool")
    num_items = parsed.items or (1000 if num_gpus else 100)
    report = bench_pool(config, num_items=num_items, repeats=parsed.repeats, on_gpu=num_gpus > 0)
    return _show(report, parsed, table, write_plot)


def run_gateway(parsed: argparse.Namespace) -> int:
    """Measure the gateway."""
    from cluster.benchmark.gateway import bench_gateway, table, write_plot
    from cluster.config import load_config, parse_config

    default = {"num_workers": 2, "worker": {"encoder": {"model": DEFAULT_MODEL}}}
    config = load_config(parsed.config) if parsed.config else parse_config(default, source="bench gateway")
    report = bench_gateway(
        config,
        repeats=parsed.repeats,
        num_items=parsed.items,
        connections=parsed.connections,
        num_requests=parsed.requests,
    )
    return _show(report, parsed, table, write_plot)


def run_change(parsed: argparse.Namespace) -> int:
    """Measure a worker that changes its graphs."""
    from cluster.benchmark.change import bench_change, table, write_plot
    from cluster.config import load_config
    from encoder.config import EncoderConfig
    from workers.config import WorkerConfig

    config = (
        load_config(parsed.config).worker if parsed.config else WorkerConfig(encoder=EncoderConfig(model=DEFAULT_MODEL))
    )
    if parsed.model is not None:
        config = config.model_copy(update={"encoder": config.encoder.model_copy(update={"model": parsed.model})})
    return _show(bench_change(config, repeats=parsed.repeats), parsed, table, write_plot)


def _show(
    report: Report,
    parsed: argparse.Namespace,
    table: Callable[[Report], str],
    write_plot: Callable[[Report, Path], None],
) -> int:
    """Print a bench's table, and write the files that were asked for."""
    from encoder.benchmark.files import save_json

    print(table(report))
    if parsed.json is not None:
        save_json(report if isinstance(report, dict) else report.as_dict(), parsed.json)
    if parsed.plot is not None:
        write_plot(report, parsed.plot)
    return OK
