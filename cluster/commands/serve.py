"""`encpool serve`: the HTTP gateway in the foreground."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.commands.arguments import OK

if TYPE_CHECKING:
    from cluster.commands.arguments import Commands


def add(commands: Commands) -> None:
    """Declare the command."""
    serve = commands.add_parser(
        "serve",
        help="encode over HTTP",
        description="Start a pool and an HTTP gateway before it, and serve until Ctrl-C or SIGTERM, which lets "
        "requests under way end. GET / shows what it does, GET /docs what it takes.",
    )
    serve.add_argument("--config", type=Path, required=True, metavar="FILE", help="a pool's YAML configuration")
    serve.add_argument("--host", metavar="ADDRESS", help="listen on this address (default: gateway.host)")
    serve.add_argument("--port", type=int, metavar="N", help="and this port; 0: any free one (default: gateway.port)")
    serve.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Serve until somebody stops it."""
    from cluster.config import load_config, parse_config, read_yaml

    load_config(parsed.config)  # its errors name the file
    values: dict[str, Any] = read_yaml(parsed.config)
    options = {"host": parsed.host, "port": parsed.port}
    values["gateway"] = {
        **(values.get("gateway") or {}),
        **{key: value for key, value in options.items() if value is not None},
    }
    config = parse_config(values, source="serve")
    from cluster.gateway.serve import serve
    from cluster.pool import EncoderPool

    serve(lambda: EncoderPool.start(config), config.gateway)
    return OK
