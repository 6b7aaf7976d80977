"""JSON that strangers send, with a bound on the number of its values.

Python's reader makes an object of some hundred bytes of every `{}` and holds the interpreter until it is through: some
megabytes of them would stop the gateway for seconds. So marks are counted before anything is read.
"""

from __future__ import annotations

import json

from encoder.errors import RequestError

MARKS = (b",", b":", b"[", b"{")  # one before each value but the first
MAX_MARKS = 100_000  # beside those of items; those within text count too, so this is generous: 30 ms to read
MARKS_PER_ITEM = 8  # of an item with all its keys
PIECE_BYTES = 2**20  # counted at a time; between pieces other threads run


def read_json(body: bytes | bytearray | memoryview, *, max_items: int) -> object:
    """The one value that a body holds. Raises RequestError for what is no JSON, and for too many values."""
    text = bytes(body) if isinstance(body, memoryview) else body
    max_marks = MAX_MARKS + MARKS_PER_ITEM * max_items
    num_marks = 0
    for start in range(0, len(text), PIECE_BYTES):
        num_marks += sum(text.count(mark, start, start + PIECE_BYTES) for mark in MARKS)
        if num_marks > max_marks:
            raise RequestError(f"the JSON has more than {max_marks} values; send images as base64, or msgpack")
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"not JSON: {error}") from error
    return value
