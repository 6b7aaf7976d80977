"""Keys of the layout axis: how segments lie in a graph's buffers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from encoder.errors import ConfigError

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


def rectangle_choices(layouts: dict[str, Rectangle | None], rows: int, columns: int) -> list[str]:
    """Keys that may hold a segment of this grid: its exact rectangle, then covering ones by area, then packed."""
    choices = [
        (not rectangle.exact, rectangle.area, key)
        for key, rectangle in layouts.items()
        if rectangle is not None and rectangle.admits(rows, columns)
    ]
    return [key for *_, key in sorted(choices)] + [PACKED] * (PACKED in layouts)
