"""Trace files: what items a pool has seen and what became of them, as a stream of msgpack values.

The first value is the header `{"encpool_trace": 1}`; then one array an item: seconds since the epoch, model, grids
as [frames, rows, columns] each, graphs it ran in, miss reasons of what ran eagerly, and milliseconds from the launch
of its first segment to the landing of its last, at the worker. Each write is whole records in one call to a file
opened for appending, so several processes may write one file; what a crash cuts off is only the end.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import msgpack

from cluster.planning.histogram import Grids, as_grids
from encoder.errors import ConfigError

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
HEADER: bytes = msgpack.packb({"encpool_trace": FORMAT_VERSION})
_READ_BYTES = 1 << 20
_LONGEST_RECORD = 16 << 20  # bytes; more is no record of ours


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRecord:
    """One item."""

    time_s: float  # since the epoch
    model: str  # as its adapter names it, such as "minicpmv-2.6"
    grids: Grids
    graphs: tuple[str, ...]  # graph keys that its segments ran in
    misses: tuple[str, ...]  # why segments of it ran eagerly
    ms: float  # from the first launch to the last landing


class TraceWriter:
    """Appends records to a file, a bufferful at a time. One thread at a time; use it in a `with`.

    A disk that takes no more ends the trace, not the work that is traced; the log says so.

    Args:
        path: a trace to go on with, or a new file in a folder that exists.
        buffer_bytes: records kept until they are this many bytes; a crash loses no more.
        flush_s: and no longer than this, looked at with each record.
    """

    def __init__(
        self,
        path: Path,
        *,
        buffer_bytes: int = 64 << 10,
        flush_s: float = 5.0,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ConfigError when the file cannot be written, or is something else than a trace."""
        self._now_s, self._buffer_bytes, self._flush_s = now_s, buffer_bytes, flush_s
        self._path, self._failed = path, False
        self._buffer = bytearray()
        self._ends = [0]  # of the records in it
        self._flushed_s = now_s()
        self._packer = msgpack.Packer()
        try:
            _refuse_other_files(path)
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        except OSError as error:
            raise ConfigError(f"{path}: cannot write a trace: {error.strerror}") from error
        if os.fstat(self._descriptor).st_size == 0:
            self._buffer += HEADER
            self._ends.append(len(HEADER))
            self.flush()

    def write(self, record: TraceRecord) -> None:
        """Add a record; it reaches the file with its bufferful."""
        self._buffer += self._packer.pack(
            (record.time_s, record.model, record.grids, record.graphs, record.misses, record.ms)
        )
        self._ends.append(len(self._buffer))
        if len(self._buffer) >= self._buffer_bytes or self._now_s() - self._flushed_s >= self._flush_s:
            self.flush()

    def flush(self) -> None:
        """Hand what is buffered to the file."""
        buffered, self._buffer = bytes(self._buffer), bytearray()
        ends, self._ends = self._ends, [0]
        self._flushed_s = self._now_s()
        written = 0
        try:
            while written < len(buffered) and not self._failed:
                written += os.write(self._descriptor, buffered[written:])  # less than all of it where a disk fills up
        except OSError as error:
            self._failed = True
            self._take_back(written - max(end for end in ends if end <= written))
            logger.warning("%s: the trace ends here: %s", self._path, error.strerror)

    def _take_back(self, num_bytes: int) -> None:
        """Of a record that was cut off, or whoever writes next would write into it; not if somebody already has."""
        end = os.lseek(self._descriptor, 0, os.SEEK_CUR)
        if num_bytes and end == os.fstat(self._descriptor).st_size:
            os.ftruncate(self._descriptor, end - num_bytes)

    def close(self) -> None:
        """Write the rest. Nothing may be written after it."""
        self.flush()
        os.close(self._descriptor)

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def check_trace(path: Path) -> None:
    """Whether a trace may be written there, without making one. Raises ConfigError as `TraceWriter` does."""
    try:
        _refuse_other_files(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot write a trace: {error.strerror}") from error
    if not path.exists() and not path.parent.is_dir():
        raise ConfigError(f"{path}: cannot write a trace: there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{path}: cannot write a trace: {os.strerror(errno.EACCES)}")


def _refuse_other_files(path: Path) -> None:
    if path.exists() and path.stat().st_size:
        with path.open("rb") as file:
            if file.read(len(HEADER)) != HEADER:
                raise ConfigError(f"{path} is no trace of version {FORMAT_VERSION}; name another file")


def read_trace(path: Path) -> Iterator[TraceRecord]:
    """The records of a trace, one after the other. A last record that was cut off is left out.

    Raises:
        ConfigError: the file cannot be read, is no trace, is one of another version, or is damaged in the middle.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    with file:
        yield from _records(file, path)


def _records(file: BinaryIO, path: Path) -> Iterator[TraceRecord]:
    if (start := file.read(len(HEADER))) != HEADER:
        raise ConfigError(f"{path}: {_what_it_is(start)}; a trace of version {FORMAT_VERSION} is wanted")
    unpacker = msgpack.Unpacker(use_list=False, max_buffer_size=_LONGEST_RECORD + _READ_BYTES)
    number = 0
    while chunk := file.read(_READ_BYTES):
        try:
            unpacker.feed(chunk)
            for value in unpacker:
                if value == {"encpool_trace": FORMAT_VERSION}:  # two processes began the file at once
                    continue
                number += 1
                yield _record(value)
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise ConfigError(f"{path}: damaged at record {number}: {type(error).__name__}: {error}") from error


def _what_it_is(start: bytes) -> str:
    if not start:
        return "is empty"
    try:
        header = msgpack.unpackb(start)
        return f"is a trace of version {header['encpool_trace']!r}"
    except (ValueError, TypeError, KeyError, msgpack.UnpackException):
        return "is no trace"


def _record(value: Any) -> TraceRecord:
    time_s, model, grids, graphs, misses, ms = value
    if not isinstance(model, str):
        raise TypeError(f"{model!r} is no model's name")
    return TraceRecord(
        time_s=float(time_s),
        model=model,
        grids=as_grids(grids),
        graphs=tuple(str(graph) for graph in graphs),
        misses=tuple(str(miss) for miss in misses),
        ms=float(ms),
    )
