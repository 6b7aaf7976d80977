"""One run of `encpool encode`: files through a pool, its own or a standing one, into an output directory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from cluster.config import PoolConfig
from cluster.files.directory import check_directory
from cluster.files.output import OutputWriter
from cluster.files.progress import EncodeProgress
from cluster.files.sources import Source
from cluster.gateway.wire import ItemAnswer
from cluster.http_client import HttpClient, error_of
from cluster.interrupts import sigterm_as_interrupt
from cluster.lifecycle.stats import PoolStats
from cluster.notices import say
from cluster.pool import EncoderPool
from cluster.streams.outcomes import Embedding, Outcome
from encoder.types import ItemShape


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """What a run came to."""

    num_items: int
    num_failed: int
    num_parts: int
    elapsed_s: float  # encoding, without the pool's start
    rates: str

    def __str__(self) -> str:
        return f"{self.num_items} items in {self.elapsed_s:.1f} s, {self.num_failed} failed; {self.rates}"


def encode_files(
    sources: Sequence[Source],
    out: Path,
    pool: EncoderPool | PoolConfig,
    *,
    model: str | None = None,
    overwrite: bool = False,
) -> RunSummary:
    """Encode every source and write what came of it, in the order of the sources. The pool is closed at the end.

    Whatever ends the run early, the output holds what was encoded until then. Raises ConfigError for an output
    directory that is taken, a PoolError when the pool cannot start.

    Args:
        pool: a pool, or what to start one with.
        model: one of the pool's, where it has several.
    """
    check_directory(out, overwrite=overwrite)
    config = pool if isinstance(pool, PoolConfig) else pool.config
    num, models = config.num_workers, list(config.encoders)
    if isinstance(pool, PoolConfig):
        names = ", ".join(models)
        say(f"starting {num} worker{'s' * (num != 1)} with {names} ...")
    with EncoderPool.start(pool) if isinstance(pool, PoolConfig) else pool as pool:
        outcomes = pool.encode_many((source.path for source in sources), model=model)
        return _write(sources, outcomes, out, model or models[0], pool.stats)


def encode_files_over_http(
    client: HttpClient, model: str, sources: Sequence[Source], out: Path, *, overwrite: bool = False
) -> RunSummary:
    """The same through a gateway that serves this model.

    Raises ConfigError for an output directory that is taken, PoolError when nobody answers, RequestError when the
    gateway does not want us.
    """
    check_directory(out, overwrite=overwrite)
    answers = client.encode_many(source.path for source in sources)
    outcomes = (_outcome(source.path, answer) for source, answer in zip(sources, answers, strict=True))
    return _write(sources, outcomes, out, model)


def _write(
    sources: Sequence[Source],
    outcomes: Iterable[Outcome],
    out: Path,
    model: str,
    stats: Callable[[], PoolStats] | None = None,
) -> RunSummary:
    """Write what becomes of each source, and show how far it is."""
    metadata = {"format": "pt", "model": model, "encpool": _version()}
    with (
        sigterm_as_interrupt(),
        OutputWriter(out, metadata=metadata) as output,
        EncodeProgress(len(sources), stats) as progress,
    ):
        for source, outcome in zip(sources, outcomes, strict=True):
            output.write(source, outcome)
            progress.advance(None if outcome.error is None else _naming(source.path, str(outcome.error)))
        elapsed_s, rates = progress.elapsed_s, progress.rates()
    return RunSummary(
        num_items=progress.num_done,
        num_failed=progress.num_failed,
        num_parts=output.num_parts,
        elapsed_s=elapsed_s,
        rates=rates,
    )


def _outcome(path: str, answer: ItemAnswer) -> Outcome:
    tokens = answer.tokens
    if tokens is None:
        return Outcome(source=path, embedding=None, error=error_of(answer))
    num_patches = sum(frames * rows * columns for frames, rows, columns in tokens.grids)
    embedding = Embedding(
        tokens=tokens.torch(),
        shape=ItemShape(grids=tokens.grids, num_patches=num_patches, num_tokens=tokens.shape[0]),
        graphs=tokens.graphs,
        misses=tokens.misses,
        timings=dict(tokens.timings_ms),
        note=tokens.note,
        worker=tokens.worker,
        cached=tokens.cached,
    )
    return Outcome(source=path, embedding=embedding, error=None)


def default_num_workers() -> int:
    """One for each GPU of this machine, or one on its CPU."""
    return max(1, torch.cuda.device_count())


def _naming(path: str, message: str) -> str:
    return message if message.startswith(path) else f"{path}: {message}"


def _version() -> str:
    try:
        return version("encpool")
    except PackageNotFoundError:  # run from a source tree that is not installed
        return "unknown"
