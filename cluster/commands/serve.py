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
        "requests under way end, or until the pool of --pool is ended. GET / shows what it does, GET /docs what it "
        "takes.",
    )
    source = serve.add_mutually_exclusive_group(required=True)
    source.add_argument("--config", type=Path, metavar="FILE", help="a pool's YAML configuration")
    source.add_argument(
        "--pool", "--name", metavar="NAME", help="serve this pool that `encpool up` has raised, and leave it"
    )
    serve.add_argument("--host", metavar="ADDRESS", help="listen on this address (default: gateway.host)")
    serve.add_argument("--port", type=int, metavar="N", help="and this port; 0: any free one (default: gateway.port)")
    serve.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Serve until somebody stops it."""
    options = {key: value for key in ("host", "port") if (value := getattr(parsed, key)) is not None}
    if parsed.pool is not None:
        return _serve_standing(parsed.pool, options)
    from cluster.config import load_config, parse_config
    from cluster.yaml_file import read_yaml

    load_config(parsed.config)  # its errors name the file
    values: dict[str, Any] = read_yaml(parsed.config)
    values["gateway"] = {**(values.get("gateway") or {}), **options}
    config = parse_config(values, source="serve")
    from cluster.gateway.serve import serve
    from cluster.pool import EncoderPool

    serve(lambda: EncoderPool.start(config), config.gateway)
    return OK


def _serve_standing(name: str, options: dict[str, Any]) -> int:
    from cluster.config import parse_config
    from cluster.gateway.serve import serve
    from cluster.pool import EncoderPool

    with EncoderPool.connect(name) as pool:
        values = pool.config.model_dump()
        values["gateway"] |= options
        config = parse_config(values, source="serve")
        serve(lambda: pool, config.gateway)
    return OK
