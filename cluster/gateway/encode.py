"""`POST /v1/encode`: items in, their tokens out."""

from __future__ import annotations

import time
from contextlib import aclosing

from aiohttp import web

from cluster.gateway.answers import send_stream, send_whole
from cluster.gateway.bodies import read_encode_request
from cluster.gateway.door import Door
from cluster.gateway.work import MAX_ITEMSIZE, TEXT_BYTES


async def encode(door: Door, request: web.Request) -> web.StreamResponse:
    """Answer one request."""
    arrived_s = time.monotonic()
    config = door.config
    with door.admit(request) as (backend, share):
        asked = await read_encode_request(
            request,
            share,
            max_bytes=config.max_request_bytes,
            max_items=config.max_request_items,
            timeout_s=config.read_timeout_s,
        )
        door.counters.body(share.num_bytes)
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
        async with aclosing(door.counted(work.answers())) as answers:
            if options.stream:
                return await send_stream(
                    request, answers, encoding=options.encoding, as_msgpack=as_msgpack, write_timeout_s=timeout_s
                )
            found = sorted([answer async for answer in answers], key=lambda answer: answer.index)
        return await send_whole(
            request, model, found, encoding=options.encoding, as_msgpack=as_msgpack, write_timeout_s=timeout_s
        )
