"""Answers as they go out: whole, or item by item; to readers who may be slow, or gone.

Nothing large is made at once: what is msgpack goes out from where it lies, and JSON, which is several times its
tokens, is written piece by piece, a large one beside the event loop.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterable, Iterator, Sequence
from contextlib import aclosing
from typing import Any

import msgpack
from aiohttp import web

from cluster.gateway.item_maps import end_map, json_answer, json_item, msgpack_answer, msgpack_item
from cluster.gateway.statuses import RETRY, joint_status, status_of
from cluster.gateway.wire import JSON, JSON_LINES, MSGPACK, Encoded, ItemAnswer
from encoder.errors import EncoderPoolError

PIECE_BYTES = 256 * 1024  # a reader must take one within the time limit
MAX_LOOP_BYTES = 256 * 1024  # of tokens; more of them are written as JSON in a thread


class SlowReader(Exception):
    """Took nothing for too long; its connection is gone."""


def error_response(error: EncoderPoolError, retry_after_s: int | None = None) -> web.Response:
    """A refusal of the whole request, in the shape that OpenAI's clients read too."""
    status = status_of(error)
    body = {"error": {"type": type(error).__name__, "message": str(error), "code": status, "param": None}}
    headers: dict[str, str] = {}
    if status in RETRY:
        headers["Retry-After"] = str(retry_after_s or 1)
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return web.json_response(body, status=status, headers=headers)


async def send_whole(
    request: web.Request,
    model: str,
    answers: Sequence[ItemAnswer],
    *,
    encoding: str,
    as_msgpack: bool,
    write_timeout_s: float,
) -> web.StreamResponse:
    """All items, in the order that they were asked in. Raises SlowReader."""
    status = joint_status([answer.status for answer in answers])
    headers = {"Retry-After": "1"} if status in RETRY else {}
    if not as_msgpack:
        return await send_json(
            request,
            json_answer(model, answers, encoding),
            is_large=sum(map(_token_bytes, answers)) > MAX_LOOP_BYTES,
            status=status,
            headers=headers,
            write_timeout_s=write_timeout_s,
        )
    pieces = msgpack_answer(model, answers)
    response = web.StreamResponse(status=status, headers=headers)
    response.content_type = MSGPACK
    response.content_length = sum(map(len, pieces))
    writer = _Writer(request, response, write_timeout_s)
    await writer.begin()
    await writer.write(pieces)
    return await writer.end()


async def send_json(
    request: web.Request,
    pieces: Iterator[bytes],
    *,
    is_large: bool,
    write_timeout_s: float,
    status: int = 200,
    headers: dict[str, str] | None = None,
) -> web.StreamResponse:
    """One value of JSON; a large one has no length at its head. Raises SlowReader."""
    response = web.StreamResponse(status=status, headers=headers)
    response.content_type = JSON
    writer = _Writer(request, response, write_timeout_s)
    if is_large:
        await writer.begin()
        async for chunk in _beside(pieces):
            await writer.write([chunk])
    else:
        body = b"".join(pieces)
        response.content_length = len(body)
        await writer.begin()
        await writer.write([body])
    return await writer.end()


async def send_stream(
    request: web.Request,
    answers: AsyncGenerator[ItemAnswer],
    *,
    encoding: str,
    as_msgpack: bool,
    write_timeout_s: float,
) -> web.StreamResponse:
    """Each item when it ends, and a last map. Raises SlowReader."""
    response = web.StreamResponse(headers={"X-Accel-Buffering": "no"})  # proxies pass each item on at once
    response.content_type = MSGPACK if as_msgpack else JSON_LINES
    writer = _Writer(request, response, write_timeout_s)
    await writer.begin()
    num_items = num_failed = 0
    async with aclosing(answers):
        async for answer in answers:
            num_items += 1
            num_failed += answer.tokens is None
            if as_msgpack:
                await writer.write(msgpack_item(answer))
            elif _token_bytes(answer) <= MAX_LOOP_BYTES:
                await writer.write([b"".join(json_item(answer, encoding)) + b"\n"])
            else:
                async for chunk in _beside(json_item(answer, encoding)):
                    await writer.write([chunk])
                await writer.write([b"\n"])
    end = end_map(num_items, num_failed)
    await writer.write([msgpack.packb(end) if as_msgpack else json.dumps(end).encode() + b"\n"])
    return await writer.end()


class _Writer:
    """Writes an answer to a reader who has so long for each piece. All of it raises SlowReader."""

    def __init__(self, request: web.Request, response: web.StreamResponse, timeout_s: float) -> None:
        self._request = request
        self._response = response
        self._timeout_s = timeout_s

    async def begin(self) -> None:
        await self._response.prepare(self._request)

    async def write(self, pieces: Iterable[Encoded]) -> None:
        for piece in pieces:
            view = memoryview(piece)
            for start in range(0, len(view), PIECE_BYTES):
                await self._within(self._response.write(view[start : start + PIECE_BYTES]))

    async def end(self) -> web.StreamResponse:
        """To the last byte: once a request is over, this process may end."""
        transport = self._request.transport
        if isinstance(transport, asyncio.WriteTransport):
            transport.set_write_buffer_limits(high=0)
        await self._within(self._response.write_eof())
        if isinstance(transport, asyncio.WriteTransport):
            transport.set_write_buffer_limits()
        return self._response

    async def _within(self, writing: Coroutine[Any, Any, None]) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await writing
        except TimeoutError:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise SlowReader(f"nothing was read for {self._timeout_s:g} s") from None


async def _beside(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Pieces put together in a thread, some at a time; between two of them the loop may have the interpreter."""
    while chunk := await asyncio.to_thread(_some, pieces):
        yield chunk


def _some(pieces: Iterator[bytes]) -> bytes:
    taken: list[bytes] = []
    num_bytes = 0
    for piece in pieces:
        taken.append(piece)
        num_bytes += len(piece)
        if num_bytes >= PIECE_BYTES:
            break
    return b"".join(taken)


def _token_bytes(answer: ItemAnswer) -> int:
    return 0 if answer.tokens is None else len(answer.tokens.data)
