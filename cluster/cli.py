"""The `encpool` command: parse, load the configuration, call one function.

Exit status: 0 all well, 1 something failed, 2 wrong usage, 130 interrupted. Results go to stdout, the rest to stderr.
Nothing heavy is imported until a command runs, so that `encpool --help` answers at once.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from encoder.errors import ConfigError, EncoderPoolError, WeightsError

if TYPE_CHECKING:
    from cluster.config import PoolConfig

Report = TypeVar("Report")

OK, FAILED, WRONG_USAGE, INTERRUPTED = 0, 1, 2, 130

DEFAULT_MODEL = "tiny-minicpmv-2.6"
DTYPES = ("auto", "float32", "bfloat16", "float16")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    parsed = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="encpool: %(message)s")
    logging.getLogger("huggingface_hub").propagate = False  # it has a handler of its own
    try:
        status: int = parsed.run(parsed)
        sys.stdout.flush()
    except (ConfigError, WeightsError) as error:
        return _fail(error, WRONG_USAGE)
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except EncoderPoolError as error:
        return _fail(error, FAILED)
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}" if error.filename else error, FAILED)
    except KeyboardInterrupt:
        print("encpool: interrupted", file=sys.stderr)
        return INTERRUPTED
    return status


def _fail(error: Exception | str, status: int) -> int:
    for line in str(error).splitlines():
        print(f"encpool: error: {line}", file=sys.stderr)
    return status


# --- commands ---


def _encode(parsed: argparse.Namespace) -> int:
    from cluster.sources import find_sources

    sources = find_sources(parsed.paths)
    config = _encode_config(parsed)
    from cluster.encode_files import encode_files

    summary = encode_files(sources, parsed.out, config, overwrite=parsed.overwrite)
    print(f"{summary}; written to {parsed.out}")
    return FAILED if summary.num_failed else OK


def _encode_config(parsed: argparse.Namespace) -> PoolConfig:
    """The configuration file, or the embedded default, with the options laid over it."""
    from cluster.config import load_config, parse_config

    values: dict[str, Any] = {"worker": {"encoder": {"model": DEFAULT_MODEL}}}
    if parsed.config is not None:
        values = load_config(parsed.config).model_dump()
    encoder = values["worker"]["encoder"]
    if parsed.model is not None:
        encoder["model"] = parsed.model
    if parsed.dtype is not None:
        encoder["dtype"] = parsed.dtype
    if parsed.workers is not None:
        values["num_workers"] = parsed.workers
    elif "num_workers" not in values:
        from cluster.encode_files import default_num_workers

        values["num_workers"] = default_num_workers()
    return parse_config(values, source="encode")


def _demo(parsed: argparse.Namespace) -> int:
    from cluster.demo import run_demo

    return FAILED if run_demo() else OK


def _models(parsed: argparse.Namespace) -> int:
    from cluster.tables import aligned
    from encoder.adapters.registry import families

    rows = [
        (preset, name, "/".join(family.modalities), about.token_rule, about.summary)
        for name, family in families().items()
        for preset, about in family.presets.items()
    ]
    print(aligned(("model", "family", "takes", "tokens", "what it is"), rows))
    print("\nA directory or a hub id with a released checkpoint of one of these families works as well.")
    return OK


def _plan(parsed: argparse.Namespace) -> int:
    from cluster.config import load_config
    from cluster.plan_trace import plan_trace
    from encoder.config import EncoderConfig

    encoder = None if parsed.config is None else load_config(parsed.config).worker.encoder
    if parsed.model is not None:
        encoder = (
            EncoderConfig(model=parsed.model) if encoder is None else encoder.model_copy(update={"model": parsed.model})
        )
    device, gib = parsed.device, parsed.memory_gib
    print(plan_trace(parsed.trace, encoder, num_workers=parsed.workers, memory_gib=gib, device=device))
    return OK


def _check_config(parsed: argparse.Namespace) -> int:
    from cluster.config import load_config
    from cluster.config_check import describe_config

    config = load_config(parsed.file)  # its errors name the file
    try:
        description = describe_config(config)
    except (ConfigError, WeightsError) as error:
        raise ConfigError(f"{parsed.file}: {error}") from error
    print(f"{parsed.file}: {description}")
    return OK


def _init_checkpoint(parsed: argparse.Namespace) -> int:
    from encoder.checkpoints import init_checkpoint

    init_checkpoint(parsed.model, parsed.directory, seed=parsed.seed)
    print(f"wrote {parsed.model} with the weights of seed {parsed.seed} to {parsed.directory}")
    return OK


def _bench_engine(parsed: argparse.Namespace) -> int:
    import torch

    from cluster.config import load_config
    from encoder.benchmark.engine import bench_engine
    from encoder.benchmark.report import table, write_json, write_plot
    from encoder.config import EncoderConfig

    device = parsed.device or ("cuda:0" if torch.cuda.is_available() else "cpu")
    config = load_config(parsed.config).worker.encoder if parsed.config else EncoderConfig(model=DEFAULT_MODEL)
    options = {"model": parsed.model, "dtype": parsed.dtype}
    config = config.model_copy(update={name: value for name, value in options.items() if value is not None})
    report = bench_engine(config, device, repeats=parsed.repeats)
    return _show(report, parsed, table, write_json, write_plot)


def _bench_router(parsed: argparse.Namespace) -> int:
    from cluster.benchmark.router import bench_router, table, write_json, write_plot

    report = bench_router(with_ray=not parsed.no_ray)
    return _show(report, parsed, table, write_json, write_plot)


def _show(
    report: Report,
    parsed: argparse.Namespace,
    table: Callable[[Report], str],
    write_json: Callable[[Report, Path], None],
    write_plot: Callable[[Report, Path], None],
) -> int:
    """Print a bench's table, and write the files that were asked for."""
    print(table(report))
    if parsed.json is not None:
        write_json(report, parsed.json)
    if parsed.plot is not None:
        write_plot(report, parsed.plot)
    return OK


# --- arguments ---


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="encpool", description="Encode images with a pool of vision encoders and their CUDA graphs."
    )
    parser.add_argument("--version", action=_Version, help="show the version and leave")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    encode = commands.add_parser(
        "encode",
        help="encode images into one embedding each",
        description="Encode files, folders and patterns; write DIR/manifest.jsonl and DIR/part-*.safetensors. "
        "Uses the Ray cluster that RAY_ADDRESS names, or one of its own on this machine. "
        "An interrupted run keeps what it has. Exit status: 0 all encoded, 1 some failed, 2 wrong usage.",
    )
    encode.add_argument(
        "paths", nargs="+", metavar="PATH", help="an image, a folder (searched to the bottom), a pattern"
    )
    encode.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the results go")
    encode.add_argument("--config", type=Path, metavar="FILE", help="a pool's YAML configuration; options win over it")
    encode.add_argument(
        "--model", metavar="NAME|DIR", help=f"a preset, a snapshot directory or a hub id (default: {DEFAULT_MODEL})"
    )
    encode.add_argument(
        "--workers", type=_positive, metavar="N", help="number of workers (default: one a GPU, or one on the CPU)"
    )
    encode.add_argument("--dtype", choices=DTYPES, help="numbers to compute in (auto: bfloat16 on GPU, float32 on CPU)")
    encode.add_argument("--overwrite", action="store_true", help="replace an earlier run's results in DIR")
    encode.set_defaults(run=_encode)

    demo = commands.add_parser("demo", help="draw some pictures, encode them with two CPU workers, show what came out")
    demo.set_defaults(run=_demo)

    models = commands.add_parser("models", help="list the models that need no download")
    models.set_defaults(run=_models)

    plan = commands.add_parser(
        "plan",
        help="which graphs each worker should hold, for what a trace has seen",
        description="Read a trace (a pool records one when `trace_file` is set), choose graph sets for so many workers "
        "with so much memory for graphs, and say what they should bring.",
    )
    plan.add_argument("--trace", type=Path, required=True, metavar="FILE", help="what a pool has recorded")
    plan.add_argument("--workers", type=_positive, required=True, metavar="N", help="number of equal workers")
    plan.add_argument(
        "--memory-gib", type=_positive_number, required=True, metavar="G", help="GiB for graphs on each worker"
    )
    plan.add_argument("--model", metavar="NAME|DIR", help="plan for this one of the trace's models")
    plan.add_argument("--config", type=Path, metavar="FILE", help="offer this configuration's layouts and budgets")
    plan.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="whose default budgets to offer (default: %(default)s)",
    )
    plan.set_defaults(run=_plan)

    config = commands.add_parser("config", help="look at configuration files")
    actions = config.add_subparsers(title="actions", metavar="ACTION", required=True)
    check = actions.add_parser("check", help="say what a configuration file asks for, or what is wrong with it")
    check.add_argument("file", type=Path, metavar="FILE")
    check.set_defaults(run=_check_config)

    init = commands.add_parser(
        "init-checkpoint", help="write a preset's seeded weights as a released-layout checkpoint"
    )
    init.add_argument("model", metavar="MODEL", help="a preset (`encpool models` lists them)")
    init.add_argument("directory", type=Path, metavar="DIR", help="a new or empty directory")
    init.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the weights (default: 0)")
    init.set_defaults(run=_init_checkpoint)

    bench = commands.add_parser("bench", help="measure")
    subjects = bench.add_subparsers(title="subjects", metavar="SUBJECT", required=True)
    engine = subjects.add_parser("engine", help="one engine on one device beside its baselines, without a pool")
    engine.add_argument("--config", type=Path, metavar="FILE", help="a pool's YAML configuration; options win over it")
    engine.add_argument("--model", metavar="NAME|DIR", help=f"(default: {DEFAULT_MODEL})")
    engine.add_argument("--dtype", choices=DTYPES, help="(default: auto)")
    engine.add_argument("--device", metavar="NAME", help="cuda:0, cpu (default: the first GPU, or the CPU)")
    engine.add_argument("--repeats", type=_positive, default=5, metavar="N", help="(default: %(default)s)")
    engine.add_argument("--json", type=Path, metavar="FILE", help="write the figures here as well")
    engine.add_argument("--plot", type=Path, metavar="FILE", help="and draw them here (needs encpool[bench])")
    engine.set_defaults(run=_bench_engine)
    router = subjects.add_parser("router", help="routing decisions: how fast, and what they are worth; needs no GPU")
    router.add_argument("--no-ray", action="store_true", help="leave out the router actor")
    router.add_argument("--json", type=Path, metavar="FILE", help="write the figures here as well")
    router.add_argument("--plot", type=Path, metavar="FILE", help="and draw them here (needs encpool[bench])")
    router.set_defaults(run=_bench_router)
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1")
    return int(text)


def _positive_number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return number


class _Version(argparse.Action):
    """Looks the version up only when asked for it."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, dest, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"encpool {version('encpool')}")
        except PackageNotFoundError:
            print("encpool, run from a source tree that is not installed")
        parser.exit()


if __name__ == "__main__":
    sys.exit(main())
