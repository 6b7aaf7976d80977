"""The packed layout for families whose tokens are proportional to patches: segments of any grid, end to end."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from encoder.adapters.base import CaptureAxis
from encoder.adapters.layouts import PACKED
from encoder.errors import ConfigError
from encoder.helpers import copy_all
from encoder.types import AxisKeys, Capacity, SegmentShape

TOKENS_A_SEGMENT = 16
"""A graph has room for segments of so many tokens on average: for all traffic but tiny pictures."""

LADDER = (
    64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048, 2304, 2560, 2816, 3072, 3584,
    4096, 5120, 6144, 8192, 10_240, 12_288, 16_384,
)  # fmt: skip
CPU_LADDER = (128, 512, 2048)


class PackedLayout:
    """One layout axis of one key; a graph's room is its token budget, in patches too."""

    axes = (CaptureAxis(name="layout", keys=(PACKED,)),)
    choices: tuple[AxisKeys, ...] = ((PACKED,),)

    def __init__(
        self,
        layouts: Sequence[str],
        name: str,
        *,
        patches_per_token: int,
        max_segments: int | None = None,
        tokens_a_segment: int = TOKENS_A_SEGMENT,
    ) -> None:
        """`layouts` is the configured one. Raises ConfigError when it asks for more than "packed"."""
        if tuple(layouts) != (PACKED,):
            raise ConfigError(f"{name} runs packed alone, not in layouts {list(layouts)}; leave layouts out")
        self._patches_per_token, self._max_segments = patches_per_token, max_segments
        self._tokens_a_segment = tokens_a_segment

    def capacity(self, token_budget: int) -> Capacity:
        """Room of a graph."""
        segments = min(max(1, token_budget // self._tokens_a_segment), self._max_segments or token_budget)
        patches = token_budget * self._patches_per_token
        return Capacity(patches=patches, segments=segments, tokens=token_budget, longest=patches)

    def default_budgets(self, device: str) -> tuple[int, ...]:
        """Steps of at most a third from 192 on, up to the largest images that models of this kind take.

        An image of some thousand tokens fills a GPU by itself, so it runs longer by whatever its graph pads.
        """
        return CPU_LADDER if device == "cpu" else LADDER

    def exact(self, shapes: Sequence[SegmentShape]) -> tuple[AxisKeys, Capacity]:
        """A run of just these segments; sizes that attention plans are made for are rounded up."""
        lengths = [shape.num_patches for shape in shapes]
        return (PACKED,), Capacity(
            patches=sum(lengths),
            segments=1 << (len(lengths) - 1).bit_length(),
            tokens=sum(shape.num_tokens for shape in shapes),
            longest=-(-max(lengths) // 256) * 256,
        )


def fill_offsets(offsets: np.ndarray, ends: np.ndarray) -> None:
    """Write 0, the ends, and the last of them again up to the buffer's end: empty segments."""
    offsets[0] = 0
    offsets[1 : len(ends) + 1] = ends
    offsets[len(ends) + 1 :] = ends[-1] if len(ends) else 0


def fill_rows(buffer: np.ndarray, parts: Sequence[np.ndarray]) -> None:
    """Write the parts end to end and zeros after them."""
    end = sum(len(part) for part in parts)
    if parts:
        np.concatenate(parts, out=buffer[:end])
    buffer[end:] = 0


def fill_pixels(buffer: np.ndarray, parts: Sequence[np.ndarray]) -> int:
    """Write patches end to end, those of a still once for each frame of a patch; returns how many there are."""
    start, pairs = 0, []
    for part in parts:
        frames = buffer[start : start + len(part)].reshape(len(part), -1, part.shape[1])
        pairs.append((frames, part[:, None]))  # all frames in one pass: one after the other takes 2.6 times as long
        start += len(part)
    copy_all(pairs)
    return start
