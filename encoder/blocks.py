"""`BlockPool`: host memory that outputs arrive in, and that comes back when its last reader lets go of it.

A reader gets the very memory that the device copied to: copying it once more, into memory that the system has yet to
map, takes longer than the transfer did. A pool is bounded; where it has no block left, an output has to be copied.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import torch

LIMIT_BYTES = 1 << 30
LEAST_BYTES = 1 << 16

Home = deque[tuple[int, torch.Tensor | None]]
"""Where blocks come back to, from any thread: sizes, and the memory itself unless it must not be lent again."""


class Block:
    """Host memory of one output. It goes back to its pool when neither it nor a view that it lent is left."""

    __slots__ = ("_home", "memory")

    def __init__(self, memory: torch.Tensor, home: Home) -> None:
        self.memory = memory  # for who fills it
        self._home: Home | None = home

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """An array made of this holds the block itself, and so does all that is made of the array."""
        return {"version": 3, "typestr": "|u1", "shape": (len(self.memory),), "data": (self.memory.data_ptr(), False)}

    def lend(self) -> torch.Tensor:
        """Its bytes, for readers."""
        return torch.from_numpy(np.asarray(self))

    def give_up(self) -> None:
        """Something may write into it at any time: it is never lent again."""
        if self._home is not None:
            self._home.append((len(self.memory), None))
            self._home = None

    def __del__(self) -> None:
        if self._home is not None:
            self._home.append((len(self.memory), self.memory))


class BlockPool:
    """Blocks of at most `limit_bytes` in all, lent or not. One thread takes; readers may be anywhere."""

    def __init__(self, *, pinned: bool, limit_bytes: int = LIMIT_BYTES) -> None:
        self._pinned, self._limit_bytes = pinned, limit_bytes
        self._home: Home = deque()
        self._free: list[torch.Tensor] = []
        self.num_bytes = 0  # of all blocks

    def take(self, num_bytes: int) -> Block | None:
        """A block with room for so many bytes, of undefined content; None where the limit is reached."""
        self._come_home()
        size = max(LEAST_BYTES, 1 << (num_bytes - 1).bit_length())  # few sizes, so that most blocks fit again
        index = next((index for index, memory in enumerate(self._free) if len(memory) == size), None)
        if index is not None:
            return Block(self._free.pop(index), self._home)
        while self._free and self.num_bytes + size > self._limit_bytes:
            self.num_bytes -= len(self._free.pop(0))
        if self.num_bytes + size > self._limit_bytes:
            return None
        memory = torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
        self.num_bytes += size  # only now: where there was no memory, there is no block
        return Block(memory, self._home)

    def _come_home(self) -> None:
        while self._home:
            size, memory = self._home.popleft()
            if memory is None:
                self.num_bytes -= size
            else:
                self._free.append(memory)
