"""`encpool plan`: graph sets for the traffic of a trace."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.commands.arguments import OK, positive, positive_number

if TYPE_CHECKING:
    from cluster.commands.arguments import Commands


def add(commands: Commands) -> None:
    """Declare the command."""
    plan = commands.add_parser(
        "plan",
        help="which graphs each worker should hold, for what a trace has seen",
        description="Read a trace (a pool records one when `trace_file` is set), choose graph sets for so many workers "
        "with so much memory for graphs, and say what they should bring.",
    )
    plan.add_argument("--trace", type=Path, required=True, metavar="FILE", help="what a pool has recorded")
    plan.add_argument("--workers", type=positive, required=True, metavar="N", help="number of equal workers")
    plan.add_argument(
        "--memory-gib", type=positive_number, required=True, metavar="G", help="GiB for graphs on each worker"
    )
    plan.add_argument("--model", metavar="NAME|DIR", help="plan for this one of the trace's models")
    plan.add_argument("--config", type=Path, metavar="FILE", help="offer this configuration's layouts and budgets")
    plan.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="whose default budgets to offer (default: %(default)s)",
    )
    plan.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Print the plan."""
    from cluster.config import load_config
    from cluster.planning.plan_trace import plan_trace
    from encoder.config import EncoderConfig
    from encoder.errors import ConfigError

    encoders = {} if parsed.config is None else load_config(parsed.config).encoders
    if parsed.model is not None and parsed.model not in encoders:
        if len(encoders) > 1:
            raise ConfigError(f"--model: no model {parsed.model!r} in {parsed.config}; it has {', '.join(encoders)}")
        own = next(iter(encoders.values()), EncoderConfig(model=parsed.model))
        encoders = {parsed.model: own.model_copy(update={"model": parsed.model})}
    offered = [encoder for model, encoder in encoders.items() if parsed.model in (None, model)]
    device, gib = parsed.device, parsed.memory_gib
    print(plan_trace(parsed.trace, offered, num_workers=parsed.workers, memory_gib=gib, device=device))
    return OK
