"""`encpool encode`: files into embeddings."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.commands.arguments import DEFAULT_MODEL, DTYPES, FAILED, OK, lay_over, positive
from encoder.errors import ConfigError, UnauthorizedError

if TYPE_CHECKING:
    from cluster.commands.arguments import Commands
    from cluster.config import PoolConfig
    from cluster.files.encode_files import RunSummary
    from cluster.pool import EncoderPool

TOKEN_VARIABLE = "ENCPOOL_TOKEN"


def add(commands: Commands) -> None:
    """Declare the command."""
    encode = commands.add_parser(
        "encode",
        help="encode images and videos into one embedding each",
        description="Encode files, folders and patterns; write DIR/manifest.jsonl and DIR/part-*.safetensors. "
        "Uses the Ray cluster that RAY_ADDRESS names, or one of its own on this machine. "
        "An interrupted run keeps what it has. Exit status: 0 all encoded, 1 some failed, 2 wrong usage.",
    )
    encode.add_argument(
        "paths", nargs="+", metavar="PATH", help="an image or video, a folder (searched to the bottom), a pattern"
    )
    encode.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the results go")
    encode.add_argument("--pool", "--name", metavar="NAME", help="use this pool that `encpool up` has raised, as it is")
    encode.add_argument("--config", type=Path, metavar="FILE", help="a pool's YAML configuration; options win over it")
    encode.add_argument(
        "--model", metavar="NAME|DIR", help=f"a preset, a snapshot directory or a hub id (default: {DEFAULT_MODEL})"
    )
    encode.add_argument(
        "--encoder", metavar="NAME", help="which of the models that the configuration's groups, or the gateway, have"
    )
    encode.add_argument(
        "--workers", type=positive, metavar="N", help="number of workers (default: one a GPU, or one on the CPU)"
    )
    encode.add_argument("--dtype", choices=DTYPES, help="numbers to compute in (auto: bfloat16 on GPU, float32 on CPU)")
    encode.add_argument(
        "--url",
        metavar="URL",
        help=f"encode through the gateway at this address; its token, if it asks for one, in {TOKEN_VARIABLE}",
    )
    encode.add_argument("--overwrite", action="store_true", help="replace an earlier run's results in DIR")
    encode.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Encode what the paths name."""
    from cluster.files.directory import check_results

    check_results(parsed.out, overwrite=parsed.overwrite)
    from cluster.files.sources import check_named

    check_named(parsed.paths)  # before what takes seconds, torch and a pool
    if parsed.url is not None:
        summary = _encode_there(parsed)
    elif parsed.pool is not None:
        summary = _encode_through(parsed)
    else:
        config = _config(parsed)
        summary = _encode_here(parsed, config, config)
    print(f"{summary}; written to {parsed.out}")
    return FAILED if summary.num_failed else OK


def _encode_here(parsed: argparse.Namespace, config: PoolConfig, pool: EncoderPool | PoolConfig) -> RunSummary:
    from cluster.files.sources import find_sources
    from encoder.adapters.base import TakesVideo
    from encoder.adapters.registry import load_adapter

    model = _choose(config, parsed.encoder)
    sources = find_sources(parsed.paths, videos=isinstance(load_adapter(config.encoders[model]), TakesVideo))
    from cluster.files.encode_files import encode_files

    return encode_files(sources, parsed.out, pool, model=model, overwrite=parsed.overwrite)


def _encode_through(parsed: argparse.Namespace) -> RunSummary:
    """Through a standing pool."""
    if given := _about_a_pool(parsed):
        raise ConfigError(f"--{given[0]} cannot change a pool that is running; leave it out with --pool")
    from cluster.pool import EncoderPool

    with EncoderPool.connect(parsed.pool) as pool:
        return _encode_here(parsed, pool.config, pool)


def _about_a_pool(parsed: argparse.Namespace) -> list[str]:
    """Options given that say how a pool is to be started."""
    return [name for name in ("config", "model", "workers", "dtype") if getattr(parsed, name) is not None]


def _choose(config: PoolConfig, encoder: str | None) -> str:
    """The model to encode with. Raises ConfigError."""
    models = list(config.encoders)
    if encoder is None and len(models) > 1:
        raise ConfigError(f"the configuration has several models; name one with --encoder: {', '.join(models)}")
    if encoder is not None and encoder not in models:
        raise ConfigError(f"--encoder: no model {encoder!r} in the configuration; it has {', '.join(models)}")
    return encoder or models[0]


def _encode_there(parsed: argparse.Namespace) -> RunSummary:
    """Through a gateway."""
    if given := _about_a_pool(parsed):
        raise ConfigError(f"--{given[0]} is the gateway's affair; leave it out with --url")
    from cluster.files.sources import find_sources
    from cluster.gateway.wire import EncodeOptions
    from cluster.http_client import HttpClient

    options = EncodeOptions(model=parsed.encoder)
    with HttpClient(parsed.url, token=os.environ.get(TOKEN_VARIABLE) or None, options=options) as client:
        try:
            served = client.models()
        except UnauthorizedError as error:
            raise UnauthorizedError(
                f"the gateway does not know the token in {TOKEN_VARIABLE}; ask whoever runs it for one"
                if os.environ.get(TOKEN_VARIABLE)
                else f"the gateway asks for a token; set {TOKEN_VARIABLE} to yours"
            ) from error
        named = [model for model in served if parsed.encoder in (None, model["id"])]
        if not named:
            raise ConfigError(f"--encoder: no {parsed.encoder!r} there; served: {', '.join(m['id'] for m in served)}")
        if len(named) > 1:
            several = ", ".join(model["id"] for model in named)
            raise ConfigError(f"the gateway has several models; name one with --encoder: {several}")
        model = named[0]
        sources = find_sources(parsed.paths, videos="video" in model.get("modalities", ()))
        from cluster.files.encode_files import encode_files_over_http

        return encode_files_over_http(client, str(model["id"]), sources, parsed.out, overwrite=parsed.overwrite)


def _config(parsed: argparse.Namespace) -> PoolConfig:
    """The configuration file, or the embedded default, with the options laid over it."""
    from cluster.config import load_config, parse_config
    from cluster.yaml_file import read_yaml

    values: dict[str, Any] = {"worker": {"encoder": {"model": DEFAULT_MODEL}}}
    if parsed.config is not None:
        load_config(parsed.config)  # its errors name the file
        values = read_yaml(parsed.config)  # as it stands there: a group inherits what the options say
    lay_over(values, model=parsed.model, dtype=parsed.dtype)
    if parsed.workers is not None:
        values["num_workers"] = parsed.workers
    elif "num_workers" not in values and "groups" not in values:
        from cluster.files.encode_files import default_num_workers

        values["num_workers"] = default_num_workers()
    return parse_config(values, source="encode")
