"""Forms: files as items, fields as options, read with bounds on parts and lines."""

from __future__ import annotations

import asyncio
import json
import warnings
from collections.abc import Mapping
from typing import Any, cast

from aiohttp import (
    BadContentDispositionHeader,
    BadContentDispositionParam,
    BodyPartReader,
    MultipartReader,
    StreamReader,
)
from aiohttp.http_exceptions import HttpProcessingError

from cluster.gateway.limits import Share
from cluster.gateway.requests import check_count, read_options
from cluster.gateway.wire import EncodeRequest, RequestItem
from encoder.errors import RequestError, RequestTooLargeError

MAX_FIELD_BYTES = 64 * 1024
MAX_FIELDS = 64
CHUNK_BYTES = 256 * 1024
LINES_PER_PART = 128  # of its headers and boundaries
LINES_PER_TURN = 64


def expect_bad_headers() -> None:
    """Let aiohttp say nothing of bad headers of parts: it prints what strangers send, and keeps each text for ever."""
    for kind in (BadContentDispositionHeader, BadContentDispositionParam):
        warnings.simplefilter("ignore", kind)


async def read_form(
    headers: Mapping[str, str], content: StreamReader, share: Share, *, max_bytes: int, max_items: int
) -> EncodeRequest:
    """A form: every part with a file name is an item, its field's name its id; the others are options.

    Raises:
        RequestTooLargeError: too many bytes or items.
        RequestError: it is no form, or has too many fields.
        Refused: others fill the gateway.
    """
    lines = _Lines(content, max_lines=LINES_PER_PART * (max_items + MAX_FIELDS))
    items: list[RequestItem] = []
    options: dict[str, object] = {}
    num_bytes = num_fields = 0
    try:
        async for part in MultipartReader(headers, cast(StreamReader, lines)):
            if not isinstance(part, BodyPartReader):
                raise RequestError("a form within a form; send files and fields")
            is_file = part.filename is not None
            data = await _read_part(part, share, max_bytes - num_bytes if is_file else MAX_FIELD_BYTES, max_bytes)
            num_bytes += len(data)
            if part.filename is not None:
                items.append(RequestItem(data=data, item_id=part.filename[-256:]))
                check_count(len(items), max_items)
                continue
            num_fields += 1
            if num_fields > MAX_FIELDS:
                raise RequestError(f"the form has more than {MAX_FIELDS} fields beside its files")
            options[part.name or ""] = _field(data)
    except (ValueError, RuntimeError, HttpProcessingError) as error:  # all that aiohttp's reader raises
        if isinstance(error, RequestError):
            raise
        raise RequestError(f"not a form: {str(error)[:200]}") from error
    if not items:
        raise RequestError("the form has no file; send one at least, such as with curl -F image=@photo.jpg")
    return EncodeRequest(items=tuple(items), options=read_options(options))


def too_large(size: object, limit: int) -> RequestTooLargeError:
    """A body of so many bytes."""
    return RequestTooLargeError(
        f"the body has {size} bytes, the limit is {limit}; send several requests, or raise gateway.max_request_bytes"
    )


async def _read_part(part: BodyPartReader, share: Share, limit: int, max_bytes: int) -> bytearray:
    data = bytearray()
    while chunk := await part.read_chunk(CHUNK_BYTES):
        share.take(num_bytes=len(chunk))
        data += chunk
        if len(data) > limit:
            raise too_large(f"more than {max_bytes}", max_bytes)
    return data


def _field(data: bytearray) -> object:
    """`true`, `2.5` and the like as JSON reads them, anything else as text."""
    text = data.decode(errors="replace")
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value


class _Lines:
    """A body whose lines are counted: what aiohttp reads line by line it reads without a pause and without an end."""

    def __init__(self, content: StreamReader, *, max_lines: int) -> None:
        self._content = content
        self._max_lines = max_lines
        self._num_lines = 0

    async def readline(self, **options: Any) -> bytes:
        self._num_lines += 1
        if self._num_lines > self._max_lines:
            raise RequestError(f"the form has more than {self._max_lines} lines outside its files and fields")
        if self._num_lines % LINES_PER_TURN == 0:
            await asyncio.sleep(0)  # others' turn
        return await self._content.readline(**options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._content, name)
