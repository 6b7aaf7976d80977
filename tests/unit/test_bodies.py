"""Bodies that strangers send: they take room as they come, and none of them stops the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest
from aiohttp import ClientSession, StreamReader, web
from aiohttp.base_protocol import BaseProtocol

from cluster.gateway.bodies import read_encode_request
from cluster.gateway.config import GatewayConfig
from cluster.gateway.forms import read_form
from cluster.gateway.json_reader import read_json
from cluster.gateway.limits import Refused, Room
from cluster.gateway.wire import JSON, MSGPACK, EncodeRequest
from encoder.errors import EncoderPoolError, RequestError

FORM = {"Content-Type": "multipart/form-data; boundary=x"}
FILE = b'--x\r\nContent-Disposition: form-data; name="a"; filename="a.png"\r\n\r\npicture\r\n'
FIELD = b'--x\r\nContent-Disposition: form-data; name="f%d"\r\n\r\n1\r\n'


def serve(room: Room, use: Callable[[int], Awaitable[None]], *, max_bytes: int = 2**26) -> None:
    """Use a real server, by its port, that reads requests and says how they end."""

    async def handle(request: web.Request) -> web.Response:
        try:
            with room.request() as share:
                await read_encode_request(request, share, max_bytes=max_bytes, max_items=64, timeout_s=30)
        except (Refused, EncoderPoolError) as error:
            return web.Response(status=429 if isinstance(error, Refused) else 400, text=str(error))
        return web.Response()

    async def run() -> None:
        app = web.Application()
        app.add_routes([web.post("/", handle)])
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1, read_bufsize=2**20)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            async with asyncio.timeout(60):
                await use(runner.addresses[0][1])
        finally:
            await runner.cleanup()

    asyncio.run(run())


@pytest.mark.parametrize("kind", [MSGPACK, JSON, FORM["Content-Type"]])
def test_connections_that_declare_much_and_send_nothing_keep_nobody_out(kind: str) -> None:
    room = Room(GatewayConfig(max_open_bytes=1000))

    async def use(port: int) -> None:
        writers = []
        for _ in range(4):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"POST / HTTP/1.1\r\nHost: x\r\nContent-Type: {kind}\r\nContent-Length: 900\r\n\r\n".encode())
            writers.append(writer)
        while room.num_requests < 4:
            await asyncio.sleep(0.01)
        async with (
            ClientSession() as session,
            session.post(
                f"http://127.0.0.1:{port}/", data=b'{"items": ["aaaa"]}', headers={"Content-Type": JSON}
            ) as it,
        ):
            assert it.status == 200
        for writer in writers:
            writer.close()

    serve(room, use)
    assert room.num_bytes == 0


def test_bytes_that_came_take_room_until_the_request_ends() -> None:
    room = Room(GatewayConfig(max_open_bytes=1000))

    async def use(port: int) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"POST / HTTP/1.1\r\nHost: x\r\nContent-Type: {JSON}\r\nContent-Length: 999\r\n\r\n".encode())
        writer.write(bytes(900))
        while room.num_bytes < 900:
            await asyncio.sleep(0.01)
        async with (
            ClientSession() as session,
            session.post(f"http://127.0.0.1:{port}/", data=b" " * 200, headers={"Content-Type": JSON}) as it,
        ):
            assert it.status == 429
        writer.close()
        while room.num_bytes:
            await asyncio.sleep(0.01)

    serve(room, use)


def bodies_of_millions() -> dict[str, tuple[bytes, str]]:
    return {
        "objects": (b'{"items":[' + b"{}," * 5_000_000 + b"{}]}", JSON),
        "lists": (b'{"items":["",' + b"[]," * 5_000_000 + b"[]]}", JSON),
        "fields": (b"".join(FIELD % n for n in range(200_000)) + b"--x--\r\n", FORM["Content-Type"]),
        "preamble": (b"\n" * 5_000_000 + FILE + b"--x--\r\n", FORM["Content-Type"]),
    }


@pytest.mark.parametrize("name", ["objects", "lists", "fields", "preamble"])
def test_a_body_of_millions_of_values_is_refused_and_others_are_served_meanwhile(name: str) -> None:
    body, kind = bodies_of_millions()[name]
    pauses_s: list[float] = []

    async def tick() -> None:
        while True:
            started_s = time.monotonic()
            await asyncio.sleep(0.005)
            pauses_s.append(time.monotonic() - started_s)

    async def use(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"POST / HTTP/1.1\r\nHost: x\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
        ticking = asyncio.create_task(tick())

        async def send() -> None:
            writer.write(head.encode())
            for start in range(0, len(body), 2**18):
                writer.write(body[start : start + 2**18])
                await writer.drain()

        sending = asyncio.create_task(send())
        assert (await reader.readexactly(12)) == b"HTTP/1.1 400"
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        ticking.cancel()
        writer.close()

    serve(Room(GatewayConfig()), use)
    assert max(pauses_s) < 1.0  # it was 2 s and more; the machine may be busy


def test_json_counts_its_values_and_text_may_be_long() -> None:
    assert read_json(b'{"items": ["%s"]}' % (b"A" * 10**6), max_items=1) == {"items": ["A" * 10**6]}
    assert read_json(memoryview(b"[1]"), max_items=1) == [1]
    for body in (b"[" + b"1," * 200_000 + b"1]", b"[" * 200_000, b'{"a":' * 200_000):
        with pytest.raises(RequestError, match="more than 100008 values"):
            read_json(body, max_items=1)
    for body in (b"[" * 90_000, b"{", b"\xff", b"1" * 5000):
        with pytest.raises(RequestError, match="not JSON"):
            read_json(body, max_items=1)


def form(body: bytes) -> EncodeRequest:
    async def run() -> EncodeRequest:
        loop = asyncio.get_running_loop()
        content = StreamReader(BaseProtocol(loop), 2**20, loop=loop)
        content.feed_data(body)
        content.feed_eof()
        with Room(GatewayConfig()).request() as share:
            return await read_form(FORM, content, share, max_bytes=10**7, max_items=4)

    return asyncio.run(run())


def test_a_form_has_files_as_items_and_fields_as_options() -> None:
    asked = form(FILE + b'--x\r\nContent-Disposition: form-data; name="timeout_s"\r\n\r\n2.5\r\n--x--\r\n')
    assert [(item.item_id, item.data) for item in asked.items] == [("a.png", b"picture")]
    assert asked.options.timeout_s == 2.5


@pytest.mark.parametrize(
    "body",
    [
        b"--x\r\nno colon\r\n\r\ndata\r\n--x--\r\n",
        b"--x\r\nA: " + b"a" * 100_000 + b"\r\n\r\ndata\r\n--x--\r\n",
        b"--x\r\n" + b"A: b\r\n" * 5000 + b"\r\ndata\r\n--x--\r\n",
        b"--x\r\nContent-Length: -1\r\n\r\ndata\r\n--x--\r\n",
        b'--x\r\nContent-Disposition: form-data; name="_charset_"\r\n\r\n' + b"u" * 40 + b"\r\n--x--\r\n",
        b"".join(FIELD % n for n in range(100)) + FILE + b"--x--\r\n",
        b"\r\n" * 20_000 + FILE + b"--x--\r\n",
        FILE[:-9],
        b"",
    ],
)
def test_a_form_that_is_none_is_a_request_error_of_few_words(body: bytes) -> None:
    with pytest.raises(RequestError) as raised:
        form(body)
    assert len(str(raised.value)) < 300
