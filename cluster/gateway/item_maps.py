"""Items of an answer in msgpack and in JSON, in pieces, and, at the client, back."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgpack

from cluster.gateway.wire import (
    ITEM_DTYPES,
    VERSION,
    Encoded,
    ItemAnswer,
    ItemTokens,
    numbers_of,
    words,
)
from encoder.errors import RequestError

BASE64_BYTES = 192 * 1024  # of a piece; a multiple of 3, so that pieces join
TEXT_NUMBERS = 4096  # of a piece, or a row if that is longer: some 80 KiB of text, 2 ms to write


def item_map(answer: ItemAnswer) -> dict[str, Any]:
    """An item of an answer, all but its tokens' `data`."""
    entry: dict[str, Any] = {"index": answer.index, "status": answer.status}
    if answer.item_id is not None:
        entry["id"] = answer.item_id
    if answer.tokens is None:
        return {**entry, "error": {"type": answer.error, "message": answer.message}}
    tokens = answer.tokens
    entry |= {
        "dtype": tokens.dtype,
        "shape": list(tokens.shape),
        "grids": [list(grid) for grid in tokens.grids],
        "graphs": list(tokens.graphs),
        "misses": list(tokens.misses),
        "timings_ms": {name: round(ms, 3) for name, ms in tokens.timings_ms.items()},
        "worker": tokens.worker,
        "cached": tokens.cached,
    }
    if tokens.note is not None:
        entry["note"] = tokens.note
    return entry


def msgpack_item(answer: ItemAnswer) -> list[Encoded]:
    """An item in msgpack, in pieces: the tokens are not copied."""
    entry = item_map(answer)
    if answer.tokens is None:
        return [msgpack.packb(entry)]
    packer = msgpack.Packer(autoreset=False)
    packer.pack_map_header(len(entry) + 1)
    for name, value in entry.items():
        packer.pack(name)
        packer.pack(value)
    packer.pack("data")
    data = memoryview(answer.tokens.data).cast("B")
    return [packer.bytes() + b"\xc6" + len(data).to_bytes(4), data]  # the header of a binary of up to 4 GiB


def msgpack_answer(model: str, answers: Sequence[ItemAnswer]) -> list[Encoded]:
    """A whole answer in msgpack, in pieces."""
    packer = msgpack.Packer(autoreset=False)
    packer.pack_map_header(3)
    for value in ("v", VERSION, "model", model, "items"):
        packer.pack(value)
    packer.pack_array_header(len(answers))
    return [packer.bytes(), *(piece for answer in answers for piece in msgpack_item(answer))]


def json_item(answer: ItemAnswer, encoding: str) -> Iterator[bytes]:
    """An item in JSON, in pieces; its `data` is base64, or lists of numbers."""
    head = json.dumps(item_map(answer)).encode()
    if answer.tokens is None:
        yield head
        return
    yield head[:-1] + b', "data": '
    yield from _base64(answer.tokens) if encoding == "base64" else _rows(answer.tokens)
    yield b"}"


def json_answer(model: str, answers: Sequence[ItemAnswer], encoding: str) -> Iterator[bytes]:
    """A whole answer in JSON, in pieces."""
    yield json.dumps({"v": VERSION, "model": model})[:-1].encode() + b', "items": ['
    for number, answer in enumerate(answers):
        if number:
            yield b", "
        yield from json_item(answer, encoding)
    yield b"]}"


def _base64(tokens: ItemTokens) -> Iterator[bytes]:
    data = memoryview(tokens.data).cast("B")
    yield b'"'
    for start in range(0, len(data), BASE64_BYTES):
        yield base64.b64encode(data[start : start + BASE64_BYTES])
    yield b'"'


def _rows(tokens: ItemTokens) -> Iterator[bytes]:
    """A number in a list takes more memory than its text, and either several times its bytes."""
    found = words(tokens)
    rows, width = tokens.shape
    per_piece = max(1, TEXT_NUMBERS // max(1, width))
    yield b"["
    for start in range(0, rows, per_piece):
        part = numbers_of(found[start : start + per_piece], tokens.dtype).tolist()
        yield (b", " if start else b"") + json.dumps(part)[1:-1].encode()
    yield b"]"


def end_map(num_items: int, num_failed: int) -> dict[str, Any]:
    """The last map of a streamed answer."""
    return {"end": True, "num_items": num_items, "num_failed": num_failed}


def read_answer_item(entry: Mapping[str, Any]) -> ItemAnswer:
    """An item of a msgpack answer, at the client. Raises RequestError when it is none."""
    try:
        if "error" in entry:
            return ItemAnswer(
                index=entry["index"],
                status=entry["status"],
                item_id=entry.get("id"),
                error=entry["error"]["type"],
                message=entry["error"]["message"],
            )
        rows, width = entry["shape"]
        tokens = ItemTokens(
            dtype=entry["dtype"],
            shape=(rows, width),
            data=entry["data"],
            grids=tuple((frames, high, wide) for frames, high, wide in entry["grids"]),
            graphs=tuple(entry["graphs"]),
            misses=tuple(entry["misses"]),
            timings_ms=entry["timings_ms"],
            note=entry.get("note"),
            worker=entry["worker"],
            cached=entry["cached"],
        )
        if rows * width * ITEM_DTYPES[tokens.dtype].itemsize != len(tokens.data):
            raise ValueError(f"{len(tokens.data)} bytes are no {rows} x {width} {tokens.dtype}")
    except (KeyError, TypeError, ValueError) as error:
        raise RequestError(f"this is no item of an answer: {type(error).__name__}: {error}") from error
    return ItemAnswer(index=entry["index"], status=entry["status"], item_id=entry.get("id"), tokens=tokens)
