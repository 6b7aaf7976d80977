"""The `encpool` command: parse, run the command's file in `commands/`, turn its error into an exit status.

Exit status: 0 all well, 1 something failed, 2 wrong usage, 130 interrupted (Ctrl-C, SIGTERM). Results go to
stdout, the rest to stderr.
Nothing heavy is imported until a command runs, so that `encpool --help` answers at once.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper

from cluster.commands import bench, encode, look, plan, serve, standing, trace
from cluster.commands.arguments import FAILED, INTERRUPTED, WRONG_USAGE
from cluster.interrupts import sigterm_as_interrupt
from cluster.notices import say
from encoder.errors import ConfigError, EncoderPoolError, WeightsError

COMMANDS = (encode, standing, serve, look, trace, plan, bench)  # in the order of the help


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # a file's name may be no text, or none that it can show
    parsed = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="encpool: %(message)s")
    logging.getLogger("huggingface_hub").propagate = False  # it has a handler of its own
    try:
        with sigterm_as_interrupt():
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
        say("interrupted")
        return INTERRUPTED
    return status


def _fail(error: Exception | str, status: int) -> int:
    for line in str(error).splitlines():
        say(f"error: {line}")
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="encpool", description="Encode images with a pool of vision encoders and their CUDA graphs."
    )
    parser.add_argument("--version", action=_Version, help="show the version and leave")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add(commands)
    return parser


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
