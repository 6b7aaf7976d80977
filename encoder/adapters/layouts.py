"""Keys of the layout axis: how segments lie in a graph's buffers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from encoder.errors import ConfigError
from encoder.types import AxisKeys, Capacity, Grid, SegmentShape

PACKED = "packed"
"""Segments of any grid, end to end."""

VLLM = ("<=32x32", "<=32x64", "<=64x32", "<=70x70")
"""The four padded rectangles of vLLM's encoder graphs (pull request 42785)."""

_RECTANGLE = re.compile(r"(<=)?([1-9]\d*)x([1-9]\d*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rectangle:
    """A grid of patches that each segment of a graph gets to itself."""

    rows: int
    columns: int
    exact: bool  # takes only its own grid, and needs no mask

    @property
    def area(self) -> int:
        """Patches."""
        return self.rows * self.columns

    def admits(self, rows: int, columns: int) -> bool:
        """Whether a segment of this grid may lie in it. Too large a grid is refused, never clamped."""
        if self.exact:
            return (rows, columns) == (self.rows, self.columns)
        return rows <= self.rows and columns <= self.columns


def parse_layouts(layouts: Sequence[str]) -> dict[str, Rectangle | None]:
    """Layout keys in order, each with its rectangle; None for the packed one.

    Raises:
        ConfigError: a key that is none of "packed", "vllm", "24x43" (exactly) or "<=32x64" (all that fit).
    """
    parsed: dict[str, Rectangle | None] = {}
    for layout in layouts:
        for key in VLLM if layout == "vllm" else (layout,):
            match = _RECTANGLE.fullmatch(key)
            if match is None and key != PACKED:
                raise ConfigError(
                    f"unknown layout {key!r}; use 'packed', 'vllm', rows x columns of patches such as '24x43', "
                    f"or '<=32x64' for every segment that fits"
                )
            parsed[key] = match and Rectangle(rows=int(match[2]), columns=int(match[3]), exact=not match[1])
    return parsed


class SegmentLayouts:
    """How segments of about equal size, each of the same number of tokens, lie in buffers: packed or in rectangles."""

    def __init__(
        self, names: Sequence[str], *, tokens: int, nominal_patches: int, max_segments: int | None = None
    ) -> None:
        """`tokens` and `nominal_patches` are those of one segment. Raises ConfigError for unknown names."""
        self.rectangles = parse_layouts(names)
        self._tokens, self._nominal_patches, self._max_segments = tokens, nominal_patches, max_segments

    @property
    def keys(self) -> tuple[str, ...]:
        """Of the capture axis."""
        return tuple(self.rectangles)

    def choices(self, grid: Grid) -> list[AxisKeys]:
        """Keys that may hold this grid: its exact rectangle, then covering ones by area, then packed."""
        _, rows, columns = grid
        fitting = [
            (not rectangle.exact, rectangle.area, key)
            for key, rectangle in self.rectangles.items()
            if rectangle is not None and rectangle.admits(rows, columns)
        ]
        choices: list[AxisKeys] = [(key,) for *_, key in sorted(fitting)]
        return [*choices, (PACKED,)] if PACKED in self.rectangles else choices

    def segments(self, token_budget: int) -> int:
        """How many a graph has room for. Raises ConfigError when it is none."""
        segments = min(token_budget // self._tokens, self._max_segments or token_budget)
        if segments < 1:
            raise ConfigError(
                f"token budget {token_budget} holds no slice of {self._tokens} tokens; use multiples of {self._tokens}"
            )
        return segments

    def capacity(self, axis_keys: AxisKeys, token_budget: int) -> Capacity:
        """Room of a graph. Raises ConfigError when the budget holds no segment."""
        segments = self.segments(token_budget)
        rectangle = self.rectangles[str(axis_keys[0])]
        if rectangle is None:
            patches = packed_rows(segments, self._nominal_patches)
            longest = min(patches, self._nominal_patches * 5 // 4)
        else:
            patches, longest = segments * rectangle.area, rectangle.area
        return Capacity(patches=patches, segments=segments, tokens=segments * self._tokens, longest=longest)

    def budgets(self, segments: Sequence[int]) -> tuple[int, ...]:
        """Token budgets for these numbers of segments, as far as a graph may hold so many."""
        most = self._max_segments or max(segments)
        return tuple(count * self._tokens for count in segments if count <= most) or (most * self._tokens,)

    def exact(self, shapes: Sequence[SegmentShape]) -> tuple[AxisKeys, Capacity]:
        """A packed run of just these segments; sizes that attention plans are made for are rounded up."""
        lengths = [shape.num_patches for shape in shapes]
        segments = 1 << (len(lengths) - 1).bit_length()
        return (PACKED,), Capacity(
            patches=sum(lengths),
            segments=segments,
            tokens=segments * self._tokens,
            longest=-(-max(lengths) // 256) * 256,
        )

    def rows(self, axis_keys: AxisKeys, lengths: Sequence[int]) -> list[slice]:
        """Buffer rows of each segment: end to end, or at the start of its own rectangle."""
        rectangle = self.rectangles.get(str(axis_keys[0]))
        if rectangle is None:
            return [slice(end - length, end) for end, length in zip(accumulate(lengths), lengths, strict=True)]
        return [slice(index * rectangle.area, index * rectangle.area + length) for index, length in enumerate(lengths)]


def packed_rows(segments: int, nominal_patches: int) -> int:
    """Rows of a packed graph: segments are a little over or under nominal; many of them average out.

    A slice has at most 1056/1024 of the nominal patches up to an aspect ratio of 4, and 1028/1024 on average.
    Rounded up to whole GEMM tiles of 128 rows where that is less than 2 % of the rows.
    """
    rows = nominal_patches * 33 // 32 if segments <= 2 else nominal_patches * 81 // 80
    tile = 128 if segments * nominal_patches >= 6400 else 16
    return -(-segments * rows // tile) * tile
