"""What `encpool encode` leaves behind: `manifest.jsonl` and `part-00000.safetensors`, `part-00001...`.

A part is collected in a nameless file and gets its name when it is whole; the manifest's lines of its items follow only
then. So whatever stops a run, each line names a tensor that is there. Ctrl-C comes between any two steps, so every step
can be repeated, and what an interrupted one left behind is written over.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import torch

from cluster.files.directory import MANIFEST, results_in
from cluster.files.sources import Source
from cluster.streams.outcomes import Embedding, Outcome

MAX_PART_BYTES = 2**30

_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


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
        self._manifest_bytes = 0
        for path in results_in(directory):
            path.unlink()
        self._manifest = (directory / MANIFEST).open("wb")
        # The open part's tensors; those of the next part are written over them.
        self._spool: IO[bytes] = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115 (closed in __exit__)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if not isinstance(error, OSError):  # a full disk takes no more
                with self._naming_directory():
                    self._commit()
        finally:
            with self._naming_directory(), self._manifest:
                self._spool.close()

    def write(self, source: Source, outcome: Outcome) -> None:
        """Add one outcome; the manifest keeps the order of the calls."""
        line: dict[str, Any] = {"id": source.id, "source": source.path}
        if outcome.error is not None:
            line |= {"status": "error", "error": error_note(outcome.error)}
        else:
            assert outcome.embedding is not None
            with self._naming_directory():
                if self._part_bytes and self._part_bytes + outcome.embedding.tokens.nbytes > self._max_part_bytes:
                    self._commit()
                self._spool_tensor(source.id, outcome.embedding.tokens)
            line |= _describe(outcome.embedding) | {"part": self._part_name}
        self._lines.append(json.dumps(line))
        if not self._tensors:
            self._flush_lines()

    @contextmanager
    def _naming_directory(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            error.filename = error.filename or str(self.directory)  # a full disk does not say which
            raise

    @property
    def _part_name(self) -> str:
        return f"part-{self.num_parts:05}.safetensors"

    @property
    def _part_bytes(self) -> int:
        """Bytes of the open part's tensors; what the spool holds behind them counts for nothing."""
        end: int = next(reversed(self._tensors.values()))["data_offsets"][1] if self._tensors else 0
        return end

    def _spool_tensor(self, name: str, tokens: torch.Tensor) -> None:
        self._metadata["dtype"] = str(tokens.dtype).removeprefix("torch.")
        start = self._part_bytes
        self._spool.seek(start)
        self._spool.write(tokens.contiguous().view(torch.uint8).numpy().data)
        self._tensors[name] = {
            "dtype": _DTYPES[tokens.dtype],
            "shape": list(tokens.shape),
            "data_offsets": [start, start + tokens.nbytes],
        }

    def _commit(self) -> None:
        """Give the open part its header and its name, then let the manifest speak of it."""
        if self._tensors:
            header = json.dumps({"__metadata__": self._metadata, **self._tensors}).encode()  # as safetensors has it
            header += b" " * (-len(header) % 8)
            unnamed = self.directory / f".{self._part_name}.tmp"
            self._spool.truncate(self._part_bytes)
            self._spool.seek(0)
            try:
                with unnamed.open("wb") as part:
                    part.write(len(header).to_bytes(8, "little") + header)
                    shutil.copyfileobj(self._spool, part, 2**20)
            except OSError:  # a full disk wants it back
                unnamed.unlink(missing_ok=True)
                raise
            os.replace(unnamed, self.directory / self._part_name)
        self._flush_lines()
        if self._tensors:
            self._tensors, self.num_parts = {}, self.num_parts + 1

    def _flush_lines(self) -> None:
        text = "".join(f"{line}\n" for line in self._lines).encode()
        with self._naming_directory():
            self._manifest.seek(self._manifest_bytes)
            self._manifest.write(text)
            self._manifest.flush()
        self._lines, self._manifest_bytes = [], self._manifest_bytes + len(text)


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
    if embedding.cached:
        line["cached"] = True
    if embedding.note:
        line["note"] = embedding.note
    line["timings_ms"] = {name: round(value, 3) for name, value in embedding.timings.items()}
    return line
