"""Widths that are no power of two, as Triton's blocks need them."""

from __future__ import annotations

SMALLEST = 16


def split_width(width: int) -> dict[str, int]:
    """`HEAD` and `TAIL` blocks, powers of two, that cover `width` columns: 72 is 64 + 16, 1152 is 1024 + 128.

    Where the two would be as wide as the next power of two, that one block covers the row: 112 is 128 + 0.
    """
    whole = max(SMALLEST, 1 << (width - 1).bit_length())
    head = whole // 2
    if width == whole or head < SMALLEST:
        return {"HEAD": whole, "TAIL": 0}
    tail = max(SMALLEST, 1 << (width - head - 1).bit_length())
    return {"HEAD": whole, "TAIL": 0} if tail >= head else {"HEAD": head, "TAIL": tail}
