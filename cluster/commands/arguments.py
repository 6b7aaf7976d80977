"""What several commands share: exit statuses, defaults, and kinds of arguments."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from encoder.errors import ConfigError

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

OK, FAILED, WRONG_USAGE, INTERRUPTED = 0, 1, 2, 130

DEFAULT_MODEL = "tiny-minicpmv-2.6"
DTYPES = ("auto", "float32", "bfloat16", "float16")


def positive(text: str) -> int:
    """A whole number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1")
    return int(text)


def positive_number(text: str) -> float:
    """A finite number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return number


def add_pool(command: argparse.ArgumentParser, *, positional: bool = True) -> None:
    """Which standing pool is meant: `--pool NAME` or `--name NAME`, and NAME alone where nothing else stands alone."""
    ways = command.add_mutually_exclusive_group()
    if positional:
        ways.add_argument("pool", nargs="?", default=argparse.SUPPRESS, metavar="NAME", help="the pool")
    ways.add_argument("--pool", "--name", metavar="NAME", help="the pool (default: the only one)")


def lay_over(values: dict[str, Any], **options: str | None) -> None:
    """Put options of the command over `worker.encoder` of a valid configuration, and over what its groups say of it.

    Raises ConfigError for a model where there are several.
    """
    groups = values.get("groups") or ()
    common = values.get("worker", {}).get("encoder", {})
    models = dict.fromkeys({**common, **group.get("worker", {}).get("encoder", {})}.get("model") for group in groups)
    given = {key: value for key, value in options.items() if value is not None}
    if "model" in given and len(models) > 1:
        raise ConfigError(f"--model cannot change several models, {', '.join(map(str, models))}; leave it out")
    for section in groups if groups and not common else (values, *groups):
        if given:
            section.setdefault("worker", {}).setdefault("encoder", {}).update(given)
