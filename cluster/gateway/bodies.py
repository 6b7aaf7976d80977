"""Requests as they come: bodies read within limits of size and time, and understood as what they say they are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from aiohttp import web

from cluster.gateway.forms import read_form, too_large
from cluster.gateway.limits import Share
from cluster.gateway.requests import read_request
from cluster.gateway.wire import JSON, MSGPACK, EncodeRequest
from encoder.errors import ContentTypeError, RequestError

FORM = "multipart/form-data"
MSGPACK_NAMES = frozenset({MSGPACK, "application/x-msgpack", "application/vnd.msgpack"})
MAX_LOOP_BYTES = 256 * 1024  # a larger body is understood in a thread

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
        share.check(num_bytes=_check_head(request, max_bytes))
        form = read_form(request.headers, request.content, share, max_bytes=max_bytes, max_items=max_items)
        return await within(form, timeout_s)
    if kind not in MSGPACK_NAMES and kind != JSON:
        raise ContentTypeError(f"a body of {kind}; send {MSGPACK}, {JSON} or {FORM}")
    body = await read_body(request, share, max_bytes=max_bytes, timeout_s=timeout_s)
    if kind == JSON:
        return await understood(body, lambda: read_request(body, JSON, max_items=max_items))
    return read_request(body, MSGPACK, max_items=max_items)  # what is large in it is not even copied


async def read_body(request: web.Request, share: Share, *, max_bytes: int, timeout_s: float) -> bytearray:
    """All bytes of a body. Raises as `read_encode_request` does."""
    share.check(num_bytes=_check_head(request, max_bytes))
    return await within(_read_all(request, share, max_bytes), timeout_s)


async def understood(body: bytearray, read: Callable[[], Result]) -> Result:
    """What `read` makes of a body; a large one is read beside the event loop."""
    return read() if len(body) <= MAX_LOOP_BYTES else await asyncio.to_thread(read)


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
        raise too_large(length, max_bytes)
    return length


async def _read_all(request: web.Request, share: Share, max_bytes: int) -> bytearray:
    """Bytes count when they are here: a length that is only declared keeps nobody out."""
    body = bytearray()
    while not request.content.at_eof():
        chunk, _ = await request.content.readchunk()  # as it came; `readany` would join what waits, and copy it
        if len(body) + len(chunk) > max_bytes:
            raise too_large(f"more than {max_bytes}", max_bytes)
        share.take(num_bytes=len(chunk))
        body += chunk
    return body
