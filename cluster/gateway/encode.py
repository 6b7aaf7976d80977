"""`POST /v1/encode`: items in, their tokens out."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING

from aiohttp import web

from cluster.gateway.answers import send_stream, send_whole
from cluster.gateway.bodies import read_encode_request
from cluster.gateway.wire import ItemAnswer
from cluster.gateway.work import MAX_ITEMSIZE, TEXT_BYTES

if TYPE_CHECKING:
    from cluster.gateway.app import Gateway


async def encode(gateway: Gateway, request: web.Request) -> web.StreamResponse:
    """Answer one request."""
    arrived_s = time.monotonic()
    config = gateway.config
    with gateway.admit(request) as (backend, share):
        asked = await read_encode_request(
            request,
            share,
            max_bytes=config.max_request_bytes,
            max_items=config.max_request_items,
            timeout_s=config.read_timeout_s,
        )
        gateway.counters.body(share.num_bytes)
        options = asked.options
        model = backend.model(options.model)
        as_msgpack = "msgpack" in request.content_type
        is_text = options.encoding == "float" and not as_msgpack
        work = await backend.begin(
            model,
            asked.items,
            share,
            arrived_s=arrived_s,
            timeout_s=options.timeout_s,
            priority=options.priority,
            max_answer_bytes=None if options.stream else config.max_answer_bytes,
            number_bytes=TEXT_BYTES if is_text else MAX_ITEMSIZE,
        )
        timeout_s = config.write_timeout_s
        async with aclosing(counted(gateway, work.answers())) as answers:
            if options.stream:
                return await send_stream(
                    request, answers, encoding=options.encoding, as_msgpack=as_msgpack, write_timeout_s=timeout_s
                )
            found = sorted([answer async for answer in answers], key=lambda answer: answer.index)
        return await send_whole(
            request, model, found, encoding=options.encoding, as_msgpack=as_msgpack, write_timeout_s=timeout_s
        )


async def counted(gateway: Gateway, answers: AsyncGenerator[ItemAnswer]) -> AsyncGenerator[ItemAnswer]:
    """The same answers, counted, and their errors remembered for those who watch."""
    async with aclosing(answers):
        async for answer in answers:
            gateway.counters.item(answer.status, 0 if answer.tokens is None else len(answer.tokens.data))
            if answer.tokens is None:
                gateway.recent.note(answer.status, answer.error or "", answer.message)
            yield answer
