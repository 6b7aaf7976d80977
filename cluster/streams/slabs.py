"""`Slabs`: memory that a client lends, call by call, to workers on its own machine. See workers/slabs.py.

A slab is lent again once its call was answered and nobody looks at the tokens in it any more. One whose call never
was answered is dropped: the worker, if it lives, may still write to it.
"""

# Shapes: T rows of a call, E width of a token.

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import time
import uuid
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np

from encoder.travel import MESSAGE_BYTES
from workers.messages import EncodeBatch, EncodeResult, Loan

logger = logging.getLogger(__name__)

MIN_SLAB_BYTES, MAX_SLAB_BYTES = 2**20, 2**28  # sizes are powers of two; what nobody writes to takes no memory
IDLE_S = 1.0  # a slab that nobody needed for so long is closed, but for
KEPT_BYTES = 2**24  # of small ones
NOTHING = np.empty(0, np.uint8)
WORDS = {"bfloat16": np.uint16, "float16": np.float16, "float32": np.float32}


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Slab:
    """Closed with its last reference."""

    name: str
    fd: int
    memory: mmap.mmap

    def bytes_at(self, start: int, num_bytes: int) -> np.ndarray:
        """A part of it, as an array that is alone with it: another call's would be another one."""
        return np.frombuffer(self.memory, np.uint8, num_bytes, start)


@dataclass(frozen=True, slots=True, eq=False)
class Lent:
    """What went into a call beside its message."""

    slab: Slab
    loan: Loan
    worker_id: str


@dataclass(eq=False)
class Slabs:
    """Lends to those workers that can reach it. Any thread may ask; its containers change in one step each."""

    max_bytes: int
    """Of all slabs together; a call that would need more goes without."""

    now_s: Callable[[], float] = time.monotonic
    _alive: dict[str, int] = field(default_factory=dict)  # sizes by name
    _idle: dict[int, list[tuple[float, Slab]]] = field(default_factory=dict)  # by size, and since when
    _reach: dict[str, int] = field(default_factory=dict)  # by worker, once tried: bytes of its numbers; 0: none

    @property
    def num_bytes(self) -> int:
        """Of all slabs, lent or not."""
        return sum(list(self._alive.values()))

    def lend(self, worker_id: str, batch: EncodeBatch) -> tuple[EncodeBatch, Lent | None]:
        """The call as it is to be sent. Encoded bytes are in the slab only for a worker that is known to reach it."""
        sizes = [item.encoded.nbytes for item in batch.items]
        reach = self._reach.get(worker_id)
        inputs = bool(reach) and sum(sizes) > MESSAGE_BYTES
        room = batch.num_outputs * (4 if reach is None else reach)
        if reach == 0 or not (inputs or room > MESSAGE_BYTES):
            return batch, None
        ends = np.cumsum(sizes) if inputs else np.zeros(1, np.int64)
        room_at = -(-int(ends[-1]) // mmap.PAGESIZE) * mmap.PAGESIZE
        slab = self._take(room_at + room)
        if slab is None:
            return batch, None
        places = None
        if inputs:
            places = tuple((int(end) - size, int(end)) for size, end in zip(sizes, ends, strict=True))
            memory = slab.bytes_at(0, room_at)
            for item, (start, end) in zip(batch.items, places, strict=True):
                memory[start:end] = item.encoded
            batch = replace(batch, items=tuple(replace(item, encoded=NOTHING) for item in batch.items))
        loan = Loan(
            pid=os.getpid(), fd=slab.fd, name=slab.name, num_bytes=len(slab.memory), encoded=places, room_at=room_at
        )
        return replace(batch, loan=loan), Lent(slab, loan, worker_id)

    def receive(self, lent: Lent, result: EncodeResult) -> EncodeResult:
        """The answer with its tokens. While somebody holds them, the slab is not lent again."""
        if not result.reached and self._reach.get(lent.worker_id) != 0:
            logger.info("%s does not reach this process's memory: large calls go through Ray", lent.worker_id)
        self._reach[lent.worker_id] = np.dtype(WORDS[result.dtype]).itemsize if result.reached else 0
        if result.shared is None:
            self._put_back(lent.slab)
            return result
        dtype = np.dtype(WORDS[result.dtype])
        num_rows, width = result.shared
        tokens = lent.slab.bytes_at(lent.loan.room_at, num_rows * width * dtype.itemsize)
        weakref.finalize(tokens, self._put_back, lent.slab).atexit = False
        return replace(result, tokens_TE=tokens.view(dtype).reshape(num_rows, width))

    def forget(self, worker_id: str) -> None:
        """The worker may come back elsewhere."""
        self._reach.pop(worker_id, None)

    def _take(self, num_bytes: int) -> Slab | None:
        size = max(MIN_SLAB_BYTES, 1 << (num_bytes - 1).bit_length())
        try:
            return self._idle[size].pop()[1]  # the latest: its pages are still near
        except (KeyError, IndexError):
            pass
        if size > MAX_SLAB_BYTES or self.num_bytes + size > self.max_bytes:
            return None
        slab = new_slab(size)
        if slab is not None:
            self._alive[slab.name] = size
            weakref.finalize(slab, self._alive.pop, slab.name, None).atexit = False
        return slab

    def _put_back(self, slab: Slab) -> None:
        self._idle.setdefault(len(slab.memory), []).append((self.now_s(), slab))

    def trim(self) -> None:
        """Close what nobody has needed lately. To be called now and then."""
        kept_bytes = 0
        for size, idle in sorted(self._idle.items()):
            for entry in list(idle):
                if kept_bytes + size <= KEPT_BYTES or self.now_s() - entry[0] < IDLE_S:
                    kept_bytes += size
                else:
                    with suppress(ValueError):  # it is lent again
                        idle.remove(entry)


def new_slab(num_bytes: int) -> Slab | None:
    """None where the system has no such memory, or no more of it."""
    name = f"encpool-{uuid.uuid4().hex}"
    try:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (AttributeError, OSError):
        return None
    try:
        os.ftruncate(fd, num_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)  # or a worker that reads on would be killed
        slab = Slab(name, fd, mmap.mmap(fd, num_bytes))
    except OSError:
        os.close(fd)
        return None
    weakref.finalize(slab, os.close, fd).atexit = False
    return slab
