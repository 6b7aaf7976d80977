"""What `encpool encode` leaves behind: `manifest.jsonl` and `part-00000.safetensors`, `part-00001...`.

A part is collected in a hidden file and gets its name when it is whole; the manifest's lines of its items follow only
then. So whatever stops a run, each line names a tensor that is there.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import torch

from cluster.client import Embedding, Outcome
from cluster.sources import Source
from encoder.errors import ConfigError

MANIFEST = "manifest.jsonl"
MAX_PART_BYTES = 2**30

_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def check_directory(directory: Path, *, overwrite: bool = False) -> None:
    """Make the output directory, and look for an earlier run's results in it.

    Raises ConfigError when it holds some and `overwrite` does not allow to replace them, or can be no directory.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        earlier = _results_in(directory)
    except OSError as error:
        raise ConfigError(f"cannot write to {directory}: {error.strerror or error}") from error
    if earlier and not overwrite:
        raise ConfigError(
            f"{directory} holds {earlier[0].name} of an earlier run; name another --out or pass --overwrite"
        )


def _results_in(directory: Path) -> list[Path]:
    """Files of a run, the manifest first: it names the parts."""
    patterns = (MANIFEST, "part-*.safetensors", ".part-*.tmp")
    return [path for pattern in patterns for path in sorted(directory.glob(pattern))]


class OutputWriter:
    """Writes outcomes as they come, in a `with`; leaving it, also by an error, keeps what came so far.

    Replaces an earlier run's results. Holds the manifest's lines of one part in memory, and no tensor.
    """

    def __init__(self, directory: Path, *, metadata: Mapping[str, str], max_part_bytes: int = MAX_PART_BYTES) -> None:
        self.directory = directory
        self.num_parts = 0
        self._metadata = dict(metadata)
        self._max_part_bytes = max_part_bytes
        self._lines: list[str] = []  # of the open part's items, and of what came between them
        self._tensors: dict[str, dict[str, Any]] = {}  # of the open part, as its header will list them
        self._part_bytes = 0
        self._spool: IO[bytes] | None = None
        for path in _results_in(directory):
            path.unlink()
        self._manifest = (directory / MANIFEST).open("w", encoding="utf-8")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if not isinstance(error, OSError):  # a full disk takes no more
                self._commit()
        finally:
            if self._spool is not None:
                self._spool.close()
            self._manifest.close()

    def write(self, source: Source, outcome: Outcome) -> None:
        """Add one outcome; the manifest keeps the order of the calls."""
        line: dict[str, Any] = {"id": source.id, "source": source.path}
        if outcome.error is not None:
            line |= {"status": "error", "error": error_note(outcome.error)}
        else:
            assert outcome.embedding is not None
            if self._part_bytes and self._part_bytes + outcome.embedding.tokens.nbytes > self._max_part_bytes:
                self._commit()
            self._spool_tensor(source.id, outcome.embedding.tokens)
            line |= _describe(outcome.embedding) | {"part": self._part_name}
        self._lines.append(json.dumps(line))
        if not self._tensors:
            self._flush_lines()

    @property
    def _part_name(self) -> str:
        return f"part-{self.num_parts:05}.safetensors"

    def _spool_tensor(self, name: str, tokens: torch.Tensor) -> None:
        self._metadata["dtype"] = str(tokens.dtype).removeprefix("torch.")
        if self._spool is None:
            self._spool = (self.directory / f".{self._part_name}.data.tmp").open("w+b")
        self._spool.write(tokens.contiguous().view(torch.uint8).numpy().data)
        end = self._part_bytes + tokens.nbytes
        self._tensors[name] = {
            "dtype": _DTYPES[tokens.dtype],
            "shape": list(tokens.shape),
            "data_offsets": [self._part_bytes, end],
        }
        self._part_bytes = end

    def _commit(self) -> None:
        """Give the open part its header and its name, then let the manifest speak of it."""
        if self._spool is not None:
            header = json.dumps({"__metadata__": self._metadata, **self._tensors}).encode()  # as safetensors has it
            header += b" " * (-len(header) % 8)
            unnamed = self.directory / f".{self._part_name}.tmp"
            self._spool.seek(0)
            with unnamed.open("wb") as part:
                part.write(len(header).to_bytes(8, "little") + header)
                shutil.copyfileobj(self._spool, part, 2**20)
            self._spool.close()
            os.replace(unnamed, self.directory / self._part_name)
            os.unlink(self._spool.name)
            self._spool, self._tensors, self._part_bytes = None, {}, 0
            self.num_parts += 1
        self._flush_lines()

    def _flush_lines(self) -> None:
        self._manifest.writelines(f"{line}\n" for line in self._lines)
        self._manifest.flush()
        self._lines.clear()


def error_note(error: Exception) -> dict[str, str]:
    """An error as the manifest has it."""
    return {"type": type(error).__name__, "message": str(error)}


def _describe(embedding: Embedding) -> dict[str, Any]:
    line: dict[str, Any] = {
        "status": "ok",
        "num_tokens": embedding.shape.num_tokens,
        "num_patches": embedding.shape.num_patches,
        "grids": embedding.shape.grids,
    }
    # An item whose segments went different ways has several graphs, or a graph and a miss.
    if embedding.graphs:
        line["graph"] = " + ".join(embedding.graphs)
    if embedding.misses:
        line["miss"] = " + ".join(embedding.misses)
    if embedding.note:
        line["note"] = embedding.note
    line["timings_ms"] = {name: round(value, 3) for name, value in embedding.timings.items()}
    return line
