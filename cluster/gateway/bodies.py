"""Requests as they come: bodies read within limits of size and time, and understood as what they say they are."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from typing import Any, TypeVar

from aiohttp import BodyPartReader, web

from cluster.gateway.limits import Share
from cluster.gateway.wire import JSON, MSGPACK, EncodeRequest, RequestItem, check_count, read_options, read_request
from encoder.errors import ContentTypeError, RequestError, RequestTooLargeError

FORM = "multipart/form-data"
MSGPACK_NAMES = frozenset({MSGPACK, "application/x-msgpack", "application/vnd.msgpack"})
MAX_FIELD_BYTES = 64 * 1024

Result = TypeVar("Result")


async def read_encode_request(
    request: web.Request, share: Share, *, max_bytes: int, max_items: int, timeout_s: float
) -> EncodeRequest:
    """The request that a body of JSON, msgpack or a form holds.

    Raises:
        ContentTypeError: a body of another kind, or a compressed one.
        RequestTooLargeError: too many bytes or items.
        RequestError: it cannot be understood, or did not come in time.
        Refused: others fill the gateway.
    """
    kind = request.content_type
    if kind == FORM:
        return await within(_read_form(request, share, max_bytes, max_items), timeout_s)
    if kind not in MSGPACK_NAMES and kind != JSON:
        raise ContentTypeError(f"a body of {kind}; send {MSGPACK}, {JSON} or {FORM}")
    body = await read_body(request, share, max_bytes=max_bytes, timeout_s=timeout_s)
    return read_request(body, JSON if kind == JSON else MSGPACK, max_items=max_items)


async def read_body(request: web.Request, share: Share, *, max_bytes: int, timeout_s: float) -> bytearray:
    """All bytes of a body. Raises as `read_encode_request` does."""
    length = _check_head(request, max_bytes)
    share.take(num_bytes=length)
    return await within(_read_all(request, share, length, max_bytes), timeout_s)


async def within(reading: Coroutine[Any, Any, Result], timeout_s: float) -> Result:
    """The result, or RequestError when the sender takes longer."""
    try:
        async with asyncio.timeout(timeout_s):
            return await reading
    except TimeoutError:
        raise RequestError(f"the body did not come within {timeout_s:g} s") from None


def _check_head(request: web.Request, max_bytes: int) -> int:
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise ContentTypeError("a compressed body; send it as it is: images are compressed already")
    length = request.content_length or 0
    if length > max_bytes:
        raise _too_large(length, max_bytes)
    return length


async def _read_all(request: web.Request, share: Share, length: int, max_bytes: int) -> bytearray:
    body = bytearray()
    while chunk := await request.content.readany():
        body += chunk
        if len(body) > max_bytes:
            raise _too_large(f"more than {max_bytes}", max_bytes)
        if len(body) > length:  # it did not say how much would come
            share.take(num_bytes=len(body) - length)
            length = len(body)
    return body


async def _read_form(request: web.Request, share: Share, max_bytes: int, max_items: int) -> EncodeRequest:
    """A form: every part with a file name is an item, its field's name its id; the others are options."""
    share.take(num_bytes=_check_head(request, max_bytes))
    items: list[RequestItem] = []
    options: dict[str, object] = {}
    num_bytes = 0
    try:
        async for part in await request.multipart():
            if not isinstance(part, BodyPartReader):
                raise RequestError("a form within a form; send files and fields")
            data = bytearray()
            limit = max_bytes - num_bytes if part.filename else MAX_FIELD_BYTES
            while chunk := await part.read_chunk(256 * 1024):
                data += chunk
                if len(data) > limit:
                    raise _too_large(f"more than {max_bytes}", max_bytes)
            if part.filename is None:
                options[part.name or ""] = _field(data)
                continue
            num_bytes += len(data)
            items.append(RequestItem(data=data, item_id=part.filename[-256:]))
            check_count(len(items), max_items)
    except ValueError as error:
        if isinstance(error, RequestError):
            raise
        raise RequestError(f"not a form: {error}") from error
    if not items:
        raise RequestError("the form has no file; send one at least, such as with curl -F image=@photo.jpg")
    return EncodeRequest(items=tuple(items), options=read_options(options))


def _field(data: bytearray) -> object:
    """`true`, `2.5` and the like as JSON reads them, anything else as text."""
    text = data.decode(errors="replace")
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value


def _too_large(size: object, limit: int) -> RequestTooLargeError:
    return RequestTooLargeError(f"the body has {size} bytes, the limit is {limit}; send several requests")
