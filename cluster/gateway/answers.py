"""Answers as they go out: whole, or item by item; to readers who may be slow, or gone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import msgpack
from aiohttp import web

from cluster.gateway.statuses import RETRY, joint_status, status_of
from cluster.gateway.wire import (
    JSON,
    JSON_LINES,
    MSGPACK,
    VERSION,
    Encoded,
    ItemAnswer,
    end_map,
    json_item,
    msgpack_answer,
    msgpack_item,
)
from encoder.errors import EncoderPoolError

PIECE_BYTES = 256 * 1024  # a reader must take one within the time limit
MAX_LOOP_BYTES = 256 * 1024  # more JSON than this is written in a thread


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
    """All items, in the order that they were asked in."""
    status = joint_status([answer.status for answer in answers])
    headers = {"Retry-After": "1"} if status in RETRY else {}
    if not as_msgpack:
        size = sum(len(answer.tokens.data) for answer in answers if answer.tokens is not None)
        if size < MAX_LOOP_BYTES:
            text = _json_answer(model, answers, encoding)
        else:
            text = await asyncio.to_thread(_json_answer, model, answers, encoding)
        return web.Response(body=text, status=status, headers=headers, content_type=JSON)
    pieces = msgpack_answer(model, answers)
    response = web.StreamResponse(status=status, headers=headers)
    response.content_type = MSGPACK
    response.content_length = sum(map(len, pieces))
    await response.prepare(request)
    await _write(request, response, pieces, write_timeout_s)
    await response.write_eof()
    return response


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
    await response.prepare(request)
    num_items = num_failed = 0
    async with aclosing(answers):
        async for answer in answers:
            num_items += 1
            num_failed += answer.tokens is None
            pieces = msgpack_item(answer) if as_msgpack else [_line(json_item(answer, encoding))]
            await _write(request, response, pieces, write_timeout_s)
    end = end_map(num_items, num_failed)
    await _write(request, response, [msgpack.packb(end) if as_msgpack else _line(end)], write_timeout_s)
    await response.write_eof()
    return response


async def _write(
    request: web.Request, response: web.StreamResponse, pieces: Sequence[Encoded], timeout_s: float
) -> None:
    for piece in pieces:
        view = memoryview(piece)
        for start in range(0, len(view), PIECE_BYTES):
            try:
                async with asyncio.timeout(timeout_s):
                    await response.write(view[start : start + PIECE_BYTES])
            except TimeoutError:
                if request.transport is not None:
                    request.transport.abort()
                raise SlowReader(f"nothing was read for {timeout_s:g} s") from None


def _json_answer(model: str, answers: Sequence[ItemAnswer], encoding: str) -> bytes:
    """Item by item: a number in a list takes more than its text."""
    head = json.dumps({"v": VERSION, "model": model})[:-1]
    items = [json.dumps(json_item(answer, encoding)).encode() for answer in answers]
    return b'%s, "items": [%s]}' % (head.encode(), b", ".join(items))


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value).encode() + b"\n"
