"""Memory that a client lends to a worker on its own machine for one call: encoded bytes in it, tokens out.

Through Ray's object store each of the two costs several messages to the raylet, and tokens are copied once more.
A slab is a file in memory without a name in any folder: whatever process is killed, nothing is left behind. It is the
client's (cluster/streams/slabs.py); a worker opens it through /proc, and touches it only during the call.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import numpy as np

from encoder.errors import EncoderPoolError, PoolSaturatedError
from workers.messages import EncodeBatch, EncodeResult, Loan

KEPT_S = 10.0  # a slab that was not lent for so long is closed: the client may have dropped it


class SlabMaps:
    """The slabs that a worker has open. Thread-safe."""

    def __init__(self, *, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._lock = threading.Lock()
        self._maps: dict[str, np.ndarray] = {}
        self._used_s: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._maps)

    def open(self, loan: Loan) -> np.ndarray | None:
        """The slab's bytes; None when it is out of reach: of another machine, container or user."""
        with self._lock:
            self._used_s[loan.name] = self._now_s()
            memory = self._maps.get(loan.name)
            if memory is None:
                memory = _map(loan)
                if memory is None:
                    del self._used_s[loan.name]
                    return None
                self._maps[loan.name] = memory
            return memory

    def sweep(self) -> None:
        """Close those that nobody lends any more. Calls under way keep theirs."""
        now_s = self._now_s()
        with self._lock:
            for name in [name for name, used_s in self._used_s.items() if now_s - used_s > KEPT_S]:
                del self._maps[name], self._used_s[name]


def _map(loan: Loan) -> np.ndarray | None:
    try:
        fd = os.open(f"/proc/{loan.pid}/fd/{loan.fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        # Elsewhere another process has this id, and some file this number.
        if slab_name(fd) != loan.name or os.fstat(fd).st_size < loan.num_bytes:
            return None
        return np.frombuffer(mmap.mmap(fd, loan.num_bytes), np.uint8)
    except OSError:
        return None
    finally:
        os.close(fd)


def slab_name(fd: int) -> str | None:
    """Name of the memory file behind a descriptor of this process; None for any other file."""
    path = os.readlink(f"/proc/self/fd/{fd}")
    return path.removeprefix("/memfd:").removesuffix(" (deleted)") if path.startswith("/memfd:") else None


class Encodes(Protocol):
    """What `EncoderWorker` does."""

    def encode(self, batch: EncodeBatch, room: np.ndarray | None = None) -> EncodeResult: ...

    def refuse(self, batch: EncodeBatch, error: EncoderPoolError) -> EncodeResult: ...


def encode_lent(worker: Encodes, slabs: SlabMaps, batch: EncodeBatch) -> EncodeResult:
    """`worker.encode` through the slab that is lent for the call, if one is; without it where it is out of reach.

    When the items are in it, and it is not within reach as it was before, they are refused: they come again.
    """
    loan = batch.loan
    if loan is None:
        return worker.encode(batch)
    memory = slabs.open(loan)
    if memory is None:
        if loan.encoded is None:
            return worker.encode(batch)
        return worker.refuse(batch, PoolSaturatedError("the worker cannot reach the client's memory any more"))
    if loan.encoded is not None:
        # Copied: an item may outlive its call, where another of the same content waits for it.
        contents = [np.frombuffer(memory[start:end].tobytes(), np.uint8) for start, end in loan.encoded]
        items = [replace(item, encoded=content) for item, content in zip(batch.items, contents, strict=True)]
        batch = replace(batch, items=tuple(items))
    room = memory[loan.room_at :]
    result = worker.encode(batch, room)
    tokens_TE = result.tokens_TE
    if not np.may_share_memory(tokens_TE, room):
        return replace(result, reached=True)
    return replace(result, reached=True, shared=tokens_TE.shape, tokens_TE=tokens_TE[:0].copy())
