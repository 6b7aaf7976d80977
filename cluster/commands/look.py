"""`encpool demo`, `models`, `config check` and `init-checkpoint`: looking around, without a pool of one's own."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.commands.arguments import FAILED, OK
from encoder.errors import ConfigError, WeightsError

if TYPE_CHECKING:
    from cluster.commands.arguments import Commands


def add(commands: Commands) -> None:
    """Declare the commands."""
    demo = commands.add_parser("demo", help="draw some pictures, encode them with two CPU workers, show what came out")
    demo.set_defaults(run=run_demo)

    models = commands.add_parser("models", help="list the models that need no download")
    models.set_defaults(run=run_models)

    config = commands.add_parser("config", help="look at configuration files")
    actions = config.add_subparsers(title="actions", metavar="ACTION", required=True)
    check = actions.add_parser("check", help="say what a configuration file asks for, or what is wrong with it")
    check.add_argument("file", type=Path, metavar="FILE")
    check.set_defaults(run=run_check)

    init = commands.add_parser(
        "init-checkpoint", help="write a preset's seeded weights as a released-layout checkpoint"
    )
    init.add_argument("model", metavar="MODEL", help="a preset (`encpool models` lists them)")
    init.add_argument("directory", type=Path, metavar="DIR", help="a new or empty directory")
    init.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the weights (default: 0)")
    init.set_defaults(run=run_init_checkpoint)


def run_demo(parsed: argparse.Namespace) -> int:
    """Draw, encode, show."""
    from cluster.files.demo import run_demo

    return FAILED if run_demo() else OK


def run_models(parsed: argparse.Namespace) -> int:
    """List the presets."""
    from cluster.tables import aligned
    from encoder.adapters.base import modalities_of
    from encoder.adapters.registry import families, load_adapter
    from encoder.config import EncoderConfig

    rows = [
        (
            preset,
            name,
            "/".join(modalities_of(load_adapter(EncoderConfig(model=preset)))),
            about.token_rule,
            about.summary,
        )
        for name, family in families().items()
        for preset, about in family.presets.items()
    ]
    print(aligned(("model", "family", "takes", "tokens", "what it is"), rows))
    print("\nA directory or a hub id with a released checkpoint of one of these families works as well.")
    return OK


def run_check(parsed: argparse.Namespace) -> int:
    """Say what a configuration asks for."""
    from cluster.config import load_config
    from cluster.config_check import describe_config

    config = load_config(parsed.file)  # its errors name the file
    try:
        description = describe_config(config)
    except (ConfigError, WeightsError) as error:
        raise ConfigError(f"{parsed.file}: {error}") from error
    print(f"{parsed.file}: {description}")
    return OK


def run_init_checkpoint(parsed: argparse.Namespace) -> int:
    """Write a checkpoint of seeded weights."""
    from encoder.checkpoints import init_checkpoint

    init_checkpoint(parsed.model, parsed.directory, seed=parsed.seed)
    print(f"wrote {parsed.model} with the weights of seed {parsed.seed} to {parsed.directory}")
    return OK
