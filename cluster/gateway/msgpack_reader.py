"""A strict msgpack reader for what strangers send: bounded depth and number of values, binary without a copy.

The `msgpack` library bounds each array but not their sum: one byte of input can become an empty list of 64 bytes, so a
request of some megabytes would fill the memory. Here every value counts. Extension types are refused.

Format: https://github.com/msgpack/msgpack/blob/master/spec.md
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from encoder.errors import RequestError, kind_of

_NUMBERS = {
    0xCA: struct.Struct(">f"),
    0xCB: struct.Struct(">d"),
    0xCC: struct.Struct(">B"),
    0xCD: struct.Struct(">H"),
    0xCE: struct.Struct(">I"),
    0xCF: struct.Struct(">Q"),
    0xD0: struct.Struct(">b"),
    0xD1: struct.Struct(">h"),
    0xD2: struct.Struct(">i"),
    0xD3: struct.Struct(">q"),
}
_LENGTHS = {1: struct.Struct(">B"), 2: struct.Struct(">H"), 4: struct.Struct(">I")}
_SIZED = {
    0xC4: ("bin", 1),
    0xC5: ("bin", 2),
    0xC6: ("bin", 4),
    0xD9: ("str", 1),
    0xDA: ("str", 2),
    0xDB: ("str", 4),
    0xDC: ("array", 2),
    0xDD: ("array", 4),
    0xDE: ("map", 2),
    0xDF: ("map", 4),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadLimits:
    """What one message may hold."""

    max_values: int  # of any kind, keys of maps included
    max_depth: int = 5
    max_str_bytes: int = 64 * 1024


def read_msgpack(body: bytes | bytearray | memoryview, limits: ReadLimits) -> object:
    """The one value that a body holds; binary as views of the body. Raises RequestError."""
    reader = _Reader(memoryview(body).cast("B"), limits)
    value = reader.read(limits.max_depth)
    if reader.position != len(reader.view):
        raise RequestError(f"msgpack: {len(reader.view) - reader.position} bytes after the end of the value")
    return value


class _Reader:
    """Reads on from a position."""

    def __init__(self, view: memoryview, limits: ReadLimits) -> None:
        self.view = view
        self.position = 0
        self._left = limits.max_values
        self._max_str_bytes = limits.max_str_bytes

    def read(self, depth: int) -> object:
        self._left -= 1
        if self._left < 0:
            raise RequestError("msgpack: more values than a request may have")
        if depth < 0:
            raise RequestError("msgpack: nested deeper than a request may be")
        tag = self._take(1)[0]
        if tag <= 0x7F:
            return tag
        if tag >= 0xE0:
            return tag - 0x100
        if tag <= 0x8F:
            return self._map(tag & 0x0F, depth)
        if tag <= 0x9F:
            return self._array(tag & 0x0F, depth)
        if tag <= 0xBF:
            return self._str(tag & 0x1F)
        if tag in _SIZED:
            kind, width = _SIZED[tag]
            (length,) = _LENGTHS[width].unpack(self._take(width))
            if kind == "bin":
                return self._take(length)
            if kind == "str":
                return self._str(length)
            return self._array(length, depth) if kind == "array" else self._map(length, depth)
        if tag in _NUMBERS:
            number = _NUMBERS[tag]
            return number.unpack(self._take(number.size))[0]
        if tag == 0xC0:
            return None
        if tag in (0xC2, 0xC3):
            return tag == 0xC3
        raise RequestError(f"msgpack: a value of type 0x{tag:02x}; send maps, arrays, numbers, text and binary")

    def _take(self, length: int) -> memoryview:
        end = self.position + length
        if end > len(self.view):
            raise RequestError(f"msgpack: cut short: {end - len(self.view)} bytes are missing")
        part = self.view[self.position : end]
        self.position = end
        return part

    def _str(self, length: int) -> str:
        if length > self._max_str_bytes:
            raise RequestError(f"msgpack: text of {length} bytes, the limit is {self._max_str_bytes}; send binary")
        try:
            return str(self._take(length), "utf-8")
        except UnicodeDecodeError as error:
            raise RequestError(f"msgpack: text that is not UTF-8: {error.reason}") from error

    def _array(self, length: int, depth: int) -> list[object]:
        if length > self._left:  # before anything is read
            raise RequestError(f"msgpack: an array of {length}, more values than a request may have")
        return [self.read(depth - 1) for _ in range(length)]

    def _map(self, length: int, depth: int) -> dict[str, object]:
        if 2 * length > self._left:
            raise RequestError(f"msgpack: a map of {length}, more values than a request may have")
        found: dict[str, object] = {}
        for _ in range(length):
            key = self.read(0)
            if not isinstance(key, str):
                raise RequestError(f"msgpack: a key is {kind_of(key)}, keys are text")
            if key in found:
                raise RequestError(f"msgpack: key {key!r} comes twice")
            found[key] = self.read(depth - 1)
        return found
