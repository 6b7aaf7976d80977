"""Answers on their way out: in pieces, beside the event loop where they are large, and never for ever."""

from __future__ import annotations

import asyncio
import json
import time
import tracemalloc
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from aiohttp import ClientSession, web
from yarl import URL

from cluster.gateway.answers import SlowReader, send_stream, send_whole
from cluster.gateway.item_maps import json_answer, json_item, msgpack_answer
from cluster.gateway.wire import ItemAnswer, ItemTokens

Send = Callable[[web.Request], Awaitable[web.StreamResponse]]


def answer(rows: int, width: int, *, dtype: str = "float32") -> ItemAnswer:
    numbers_TE = np.random.default_rng(0).standard_normal((rows, width), np.float32)
    data = numbers_TE.tobytes() if dtype == "float32" else (numbers_TE.view(np.uint32) >> 16).astype("<u2").tobytes()
    return ItemAnswer(index=0, status=200, tokens=ItemTokens(dtype=dtype, shape=(rows, width), data=data, grids=()))


async def one(sent: ItemAnswer) -> AsyncGenerator[ItemAnswer]:
    yield sent


def serve(send: Send, use: Callable[[str], Awaitable[None]]) -> list[BaseException]:
    """Use a real server, by its URL; what its handlers raised."""
    raised: list[BaseException] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        try:
            return await send(request)
        except BaseException as error:
            raised.append(error)
            raise

    async def run() -> None:
        app = web.Application()
        app.add_routes([web.get("/", handle)])
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            async with asyncio.timeout(60):
                await use(f"http://127.0.0.1:{runner.addresses[0][1]}/")
        finally:
            await runner.cleanup()

    asyncio.run(run())
    return raised


@pytest.mark.parametrize("stream", [True, False])
def test_numbers_as_text_are_written_beside_the_event_loop(stream: bool) -> None:
    sent = answer(500, 2000)
    pauses_s: list[float] = []

    async def send(request: web.Request) -> web.StreamResponse:
        if stream:
            return await send_stream(request, one(sent), encoding="float", as_msgpack=False, write_timeout_s=30)
        return await send_whole(request, "m", [sent], encoding="float", as_msgpack=False, write_timeout_s=30)

    async def tick() -> None:
        while True:
            started_s = time.monotonic()
            await asyncio.sleep(0.002)
            pauses_s.append(time.monotonic() - started_s)

    async def use(url: str) -> None:
        ticking = asyncio.create_task(tick())
        async with ClientSession() as session, session.get(url) as reply:
            body = bytearray()
            async for chunk in reply.content.iter_any():
                body += chunk
        ticking.cancel()
        line = json.loads(body.splitlines()[0])
        found = np.array((line if stream else line["items"][0])["data"], np.float32)
        assert sent.tokens is not None
        assert found.tobytes() == sent.tokens.data

    assert serve(send, use) == []
    assert max(pauses_s) < 0.5  # it was 1 s and more; the machine may be busy


@pytest.mark.parametrize(("dtype", "encoding"), [("float32", "float"), ("bfloat16", "float"), ("float32", "base64")])
def test_a_large_item_is_never_in_memory_as_text(dtype: str, encoding: str) -> None:
    sent = answer(400, 1500, dtype=dtype)
    tracemalloc.start()
    num_bytes = sum(len(piece) for piece in json_answer("m", [sent], encoding))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert num_bytes > 3e6
    assert peak < num_bytes / 3  # with what other threads of this process take meanwhile


@pytest.mark.parametrize("encoding", ["float", "base64"])
@pytest.mark.parametrize("shape", [(0, 4), (1, 1), (3, 5000), (5000, 3), (1, 70_000)])
def test_pieces_are_one_value(shape: tuple[int, int], encoding: str) -> None:
    value = json.loads(b"".join(json_answer("m", [answer(*shape), answer(*shape)], encoding)))
    alone = json.loads(b"".join(json_item(answer(*shape), encoding)))
    assert value["items"] == [alone, alone]
    assert (alone["shape"], alone["status"]) == (list(shape), 200)


@pytest.mark.parametrize("as_msgpack", [True, False])
@pytest.mark.parametrize("stream", [True, False])
def test_a_reader_who_stands_still_is_hung_up_on_whatever_he_asked_for(as_msgpack: bool, stream: bool) -> None:
    sent = answer(3000, 1000)
    options: Any = {"encoding": "base64", "as_msgpack": as_msgpack, "write_timeout_s": 0.3}

    ended = asyncio.Event()

    async def send(request: web.Request) -> web.StreamResponse:
        try:
            if stream:
                return await send_stream(request, one(sent), **options)
            return await send_whole(request, "m", [sent], **options)
        finally:
            ended.set()

    async def use(url: str) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", URL(url).port, limit=1024)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await ended.wait()
        writer.close()

    assert [type(error) for error in serve(send, use)] == [SlowReader]


@pytest.mark.parametrize("as_msgpack", [True, False])
def test_an_answer_has_left_the_process_when_its_request_ends(as_msgpack: bool) -> None:
    left: list[int] = []

    async def send(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.set_write_buffer_limits(high=2**24)  # so that nothing waits before the end
        sent = await send_whole(
            request, "m", [answer(1000, 500)], encoding="base64", as_msgpack=as_msgpack, write_timeout_s=30
        )
        left.append(request.transport.get_write_buffer_size())
        return sent

    async def use(url: str) -> None:
        async with ClientSession() as session:
            for _ in range(2):  # over one connection
                async with session.get(url) as reply:
                    await asyncio.sleep(0.1)
                    assert len(await reply.read()) > 2e6

    assert serve(send, use) == []
    assert left == [0, 0]


def test_a_short_answer_is_text_with_its_length() -> None:
    async def send(request: web.Request) -> web.StreamResponse:
        return await send_whole(request, "m", [answer(3, 4)], encoding="float", as_msgpack=False, write_timeout_s=30)

    async def use(url: str) -> None:
        async with ClientSession() as session, session.get(url) as reply:
            body = await reply.read()
            assert reply.content_length == len(body)

    assert serve(send, use) == []


def test_msgpack_of_an_item_points_at_its_tokens() -> None:
    sent = answer(1000, 1000)
    tracemalloc.start()
    pieces = msgpack_answer("m", [sent])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sum(map(len, pieces)) > 4e6
    assert peak < 1e6
