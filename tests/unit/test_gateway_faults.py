"""Whatever breaks on an item's way through a gateway, the item ends once and with a type, and others do not notice."""

from __future__ import annotations

import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgpack
import pytest
from aiohttp import multipart
from fakes import HIDDEN, picture, until
from http_calls import Caller, Reply
from live_gateway import Live, live_gateway

from cluster.gateway import actor
from cluster.gateway.config import GatewayConfig
from cluster.gateway.fetch import Fetcher
from cluster.streams.transport import RayCall, WorkerAway
from encoder.errors import BadMediaError, ConfigError, PoolClosedError, WorkerLostError
from workers.messages import EncodeBatch, EncodeResult

GOOD, ODD = picture(1), picture(2, width=300)


@pytest.fixture
def live() -> Iterator[Live]:
    with live_gateway("ab", media_urls={"hosts": ["x"]}) as live:
        yield live


@pytest.fixture
def caller(live: Live) -> Iterator[Caller]:
    with Caller(live.url) as caller:
        yield caller


def test_the_gateway_in_this_process_encodes(caller: Caller) -> None:
    reply = caller.msgpack(items=[GOOD, ODD])
    assert reply.statuses == [200, 200]
    assert [item["shape"] for item in reply.items] == [[2, HIDDEN], [6, HIDDEN]]


@pytest.mark.parametrize("error", [ZeroDivisionError("boom"), BadMediaError("boom")])
def test_a_header_that_breaks_its_reader_is_its_own_item_s_affair(
    live: Live, caller: Caller, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    read = live.client.read

    def reads(client: Any, source: Any) -> Any:
        if bytes(source) == ODD:
            raise error
        return read(source)

    monkeypatch.setattr(type(live.client), "read", reads)
    reply = caller.msgpack(items=[GOOD, ODD, GOOD])
    assert reply.statuses == [200, 422 if isinstance(error, BadMediaError) else 500, 200]


@pytest.mark.parametrize("found", [ZeroDivisionError("boom"), b"no picture", b"\x89PNG\r\n\x1a\n", ODD])
@pytest.mark.parametrize("stream", [True, False])
def test_whatever_a_url_gives_its_item_ends_once(
    caller: Caller, monkeypatch: pytest.MonkeyPatch, found: Any, stream: bool
) -> None:
    async def fetch(fetcher: Fetcher, url: str) -> bytes:
        if isinstance(found, Exception):
            raise found
        data: bytes = found
        return data

    monkeypatch.setattr(Fetcher, "fetch", fetch)
    started_s = time.monotonic()
    items = [{"url": "https://x/a.png"}, GOOD, {"url": "https://x/b.png"}]
    if stream:
        reply = caller.msgpack(items=items, stream=True, timeout_s=20)
        unpacker = msgpack.Unpacker()
        unpacker.feed(reply.body)
        *entries, end = unpacker
        assert end["num_items"] == 3
    else:
        entries = caller.msgpack(items=items, timeout_s=20).items
    assert time.monotonic() - started_s < 15, "it was left until its deadline"
    statuses = {entry["index"]: entry["status"] for entry in entries}
    assert len(entries) == 3
    bad = 500 if isinstance(found, Exception) else 200 if found is ODD else 422
    assert statuses == {0: bad, 1: 200, 2: bad}


def test_fetched_items_count_in_the_answer_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fetch(fetcher: Fetcher, url: str) -> bytes:
        return GOOD

    monkeypatch.setattr(Fetcher, "fetch", fetch)
    limit = 2 * (2 * HIDDEN * 4)  # two answers of two float32 tokens
    with live_gateway(media_urls={"hosts": ["x"]}, max_answer_bytes=limit) as live, Caller(live.url) as caller:
        reply = caller.msgpack(items=[{"url": f"https://x/{number}"} for number in range(4)])
        assert sorted(reply.statuses) == [200, 200, 413, 413]
        streamed = caller.msgpack(items=[{"url": f"https://x/{number}"} for number in range(4)], stream=True)
        assert streamed.body.count(b"\xa6status\xcc\xc8") == 4


def test_an_embedding_that_cannot_be_handed_on_fails_alone(caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    from cluster.gateway import work

    hand_on = work.item_tokens

    def hands_on(embedding: Any) -> Any:
        if len(embedding.tokens) == 6:
            raise TypeError("boom")
        return hand_on(embedding)

    monkeypatch.setattr(work, "item_tokens", hands_on)
    assert caller.msgpack(items=[GOOD, ODD]).statuses == [200, 500]
    assert caller.msgpack(items=[GOOD]).statuses == [200]


@pytest.mark.parametrize("error", [ZeroDivisionError("boom"), WorkerLostError("boom")])
def test_a_dispatcher_that_breaks_fails_what_it_has_and_goes_on(
    live: Live, caller: Caller, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    lease = live.pool.lease
    broken = [True]

    def leases(ask: Any) -> Any:
        if broken.pop() if broken else False:
            raise error
        return lease(ask)

    monkeypatch.setattr(live.pool, "lease", leases)
    reply = caller.msgpack(items=[GOOD, ODD])
    assert reply.statuses == [500, 500]
    assert reply.items[0]["error"]["message"].startswith(f"the gateway failed: {type(error).__name__}")
    assert caller.msgpack(items=[GOOD, ODD]).statuses == [200, 200]


def test_a_worker_that_left_a_moment_ago_is_passed_over(
    live: Live, caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, result = live.pool.start, live.pool.result
    left: list[RayCall] = []

    def starts(worker_id: str, batch: EncodeBatch) -> Any:
        if not left:
            left.append(RayCall(worker_id))
            return left[0]
        return start(worker_id, batch)

    def result_of(call: Any) -> EncodeResult:
        if call in left:
            raise WorkerAway("it has left")
        return result(call)

    monkeypatch.setattr(live.pool, "start", starts)
    monkeypatch.setattr(live.pool, "result", result_of)
    assert caller.msgpack(items=[GOOD]).statuses == [200]
    assert len(left) == 1


def test_bad_headers_of_a_form_are_neither_printed_nor_kept(live: Live, caller: Caller) -> None:
    kept = vars(multipart).get("__warningregistry__", {})
    before = len(kept)
    for number in range(20):
        bad = b'--x\r\nContent-Disposition: form-data; name="a"; f%dilename\r\n\r\npicture\r\n--x--\r\n' % number
        assert caller.post("/v1/encode", bad, "multipart/form-data; boundary=x").status == 400
    assert len(vars(multipart).get("__warningregistry__", {})) <= before + 1  # and that is a version


@pytest.mark.parametrize(
    "sent", [b"no http\r\n\r\n", b"POST / HTTP/1.1\r\nHost\xf5 x: y\r\n\r\n", b"\x16\x03\x01" * 99 + b"\r\n"]
)
def test_what_is_no_http_is_answered_and_is_no_error_of_ours(
    live: Live, caller: Caller, caplog: pytest.LogCaptureFixture, sent: bytes
) -> None:
    with caller.socket() as bare:
        bare.sendall(sent)
        assert bare.recv(12) in (b"HTTP/1.0 400", b"HTTP/1.1 400")
    assert caller.msgpack(items=[GOOD]).statuses == [200]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_the_pool_s_end_is_503_for_what_is_here_and_what_comes(
    live: Live, caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(ask: Any) -> Any:
        raise PoolClosedError("the pool was ended")

    monkeypatch.setattr(live.pool, "lease", closed)
    for _ in range(2):
        reply = caller.msgpack(items=[GOOD])
        assert (reply.status, reply.headers["Retry-After"]) == (503, "1")


def test_sixty_four_connections_before_a_full_pool_each_get_one_answer() -> None:
    with live_gateway("ab", max_open_items=40) as live:
        for runner in live.runners:
            runner.gate.clear()  # replays do not end
        replies: list[Reply] = []

        def ask() -> None:
            with Caller(live.url) as caller:
                replies.append(caller.msgpack(items=[GOOD]))

        threads = [threading.Thread(target=ask) for _ in range(64)]
        for thread in threads:
            thread.start()
        until(lambda: len(replies) == 24)
        assert {(reply.status, reply.error[0]) for reply in replies} == {(429, "PoolSaturatedError")}
        assert all(int(reply.headers["Retry-After"]) >= 1 for reply in replies)
        with Caller(live.url) as other:
            assert other.get("/health").status == 200, "a full pool is no reason not to answer"
        for runner in live.runners:
            runner.gate.set()
        for thread in threads:
            thread.join(30)
        assert sorted(reply.status for reply in replies) == [200] * 40 + [429] * 24
        room = live.gateway.gateway.door.room  # type: ignore[union-attr]
        until(lambda: not room.num_requests)
        assert (room.num_items, room.num_bytes) == (0, 0)


def test_a_request_takes_room_for_its_tokens_and_a_full_room_refuses_before_it_reads() -> None:
    with live_gateway(max_open_items=2) as live, Caller(live.url) as caller, ThreadPoolExecutor(1) as threads:
        live.runners[0].gate.clear()  # replays do not end
        held = threads.submit(caller.msgpack, items=[GOOD, GOOD, ODD])  # more than the limit: alone it fits
        assert live.gateway.gateway is not None
        door = live.gateway.gateway.door
        received = "encpool_http_received_bytes_total"

        def token_bytes() -> float:
            return door.room.num_bytes - sum(s.value for s in door.counters.samples() if s.name == received)  # type: ignore[misc]

        until(lambda: door.room.num_items == 3 and token_bytes() == (2 + 2 + 6) * HIDDEN * 4)
        with caller.socket() as bare:
            bare.settimeout(10)
            bare.sendall(b"POST /v1/encode HTTP/1.1\r\nHost: x\r\nContent-Type: application/msgpack\r\n")
            bare.sendall(b"Content-Length: 100\r\n\r\n")
            assert bare.recv(12) == b"HTTP/1.1 429"
        live.runners[0].gate.set()
        assert held.result(30).statuses == [200] * 3


@pytest.mark.parametrize("priority", ["interactive", "batch"])
def test_a_request_s_priority_and_deadline_reach_the_worker(live: Live, caller: Caller, priority: str) -> None:
    came: list[EncodeBatch] = []
    answer = live.pool.answer

    def answers(worker_id: str, batch: EncodeBatch) -> EncodeResult:
        came.append(batch)
        return answer(worker_id, batch)

    live.pool.answer = answers
    assert caller.msgpack(items=[GOOD], priority=priority, timeout_s=17.0).statuses == [200]
    batch = next(batch for batch in came if batch.items[0].encoded.tobytes() == GOOD)
    assert batch.priority == priority
    timeout_s = batch.items[0].timeout_s
    assert timeout_s is not None
    assert 10 < timeout_s <= 17


@pytest.mark.parametrize("cut", [1, 100, -1])
def test_a_client_that_hangs_up_in_mid_body_leaves_nothing(live: Live, caller: Caller, cut: int) -> None:
    body = msgpack.packb({"items": [GOOD] * 4})
    with caller.socket() as bare:
        bare.sendall(b"POST /v1/encode HTTP/1.1\r\nHost: x\r\nContent-Type: application/msgpack\r\n")
        bare.sendall(b"Content-Length: %d\r\n\r\n" % len(body) + body[:cut])
        assert live.gateway.gateway is not None
        room = live.gateway.gateway.door.room
        until(lambda: room.num_requests == 1)
    until(lambda: not room.num_requests)
    assert (room.num_items, room.num_bytes) == (0, 0)
    assert caller.msgpack(items=[GOOD]).statuses == [200]


def test_what_a_cache_answers_makes_nobody_ready() -> None:
    with live_gateway(cache_bytes=2**20) as live, Caller(live.url) as caller:
        first = caller.msgpack(items=[GOOD])
        encoded_s = live.dispatcher.success_s
        until(lambda: live.pool.workers["a"].report().stats.cache.num_entries == 1)
        again = caller.msgpack(items=[GOOD])
        assert live.dispatcher.success_s == encoded_s
    assert [reply.items[0]["cached"] for reply in (first, again)] == [False, True]


def test_a_gateway_s_process_that_cannot_serve_says_why_and_ends_so_that_another_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: queue.Queue[int] = queue.Queue()
    monkeypatch.setattr(actor, "set_up_process", lambda service: None)
    monkeypatch.setattr(actor, "RETRY_S", 0.01)
    monkeypatch.setattr(os, "_exit", ended.put)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        gateway = actor.GatewayActor("none", GatewayConfig(port=taken.getsockname()[1]))
    with pytest.raises(ConfigError, match="cannot listen"):
        gateway.url()
    assert ended.get(timeout=20) == 1


def test_one_caller_s_requests_at_once_are_limited() -> None:
    with live_gateway(max_requests_in_flight=1) as live, Caller(live.url) as caller, caller.socket() as bare:
        bare.sendall(b"POST /v1/encode HTTP/1.1\r\nHost: x\r\nContent-Type: application/msgpack\r\n")
        bare.sendall(b"Content-Length: 100\r\n\r\n")
        until(lambda: live.gateway.gateway.num_requests == 1)  # type: ignore[union-attr]
        reply = caller.msgpack(items=[GOOD])
        assert (reply.status, reply.headers["Retry-After"]) == (429, "1")
        assert reply.error == (
            "RateLimitError",
            "127.0.0.1 has 1 requests under way, the limit is 1; wait for one of them",
        )
