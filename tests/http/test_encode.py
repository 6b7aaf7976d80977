"""`POST /v1/encode` of a real gateway before a real pool: every body, every status."""

from __future__ import annotations

import base64
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgpack
import numpy as np
import pytest
from http_calls import Caller, Reply

from cluster import EncoderPool
from cluster.gateway.config import GatewayConfig
from cluster.gateway.item_maps import read_answer_item
from cluster.gateway.threaded import GatewayThread
from cluster.gateway.wire import JSON, MSGPACK, as_float32
from cluster.gateway.work import TEXT_BYTES
from encoder.errors import ConfigError


def expected(pool: EncoderPool, picture: bytes) -> np.ndarray:
    return pool.encode(picture).tokens.numpy()


def tokens(item: dict[str, object]) -> np.ndarray:
    """Of an item in msgpack."""
    answer = read_answer_item(item)
    assert answer.tokens is not None, answer.message
    return as_float32(answer.tokens)


def idle(pool: EncoderPool) -> bool:
    return not any(report.backlog_ms for report in pool.stats().reports) and not any(
        member.num_leases for member in pool.members()
    )


def wait_idle(pool: EncoderPool) -> None:
    until_s = time.monotonic() + 30
    while not idle(pool):
        assert time.monotonic() < until_s, "work stays in the pool"
        time.sleep(0.05)


# --- what goes in comes out ---


def test_msgpack_gives_the_tokens_that_the_pool_gives(caller: Caller, pool: EncoderPool, pictures: list[bytes]) -> None:
    reply = caller.msgpack(items=[pictures[0], {"data": pictures[1], "id": "second"}])
    assert reply.status == 200
    assert reply.value["v"] == 1
    assert reply.value["model"] == "tiny-minicpmv-2.6"
    first, second = reply.items
    assert (first["index"], second["index"], second["id"]) == (0, 1, "second")
    assert first["dtype"] == "float32"
    assert first["graphs"]
    assert first["worker"].startswith("worker-")
    for item, picture in zip(reply.items, pictures, strict=False):
        np.testing.assert_allclose(tokens(item), expected(pool, picture), rtol=1e-5, atol=1e-5)


def test_numbers_as_text_count_as_what_their_text_takes(pool: EncoderPool, pictures: list[bytes]) -> None:
    found = pool.encode(pictures[0]).tokens
    limit = GatewayConfig(port=0, max_answer_bytes=4 * found.numel())
    items = [base64.b64encode(pictures[0]).decode()]
    with GatewayThread(pool, limit) as gateway, Caller(gateway.url) as caller:
        assert caller.json(items=items).status == 200
        assert caller.json(items=items, encoding="float").status == 413
        streamed = caller.json(items=items, encoding="float", stream=True)
    assert len(streamed.body) < 1.1 * TEXT_BYTES * found.numel()


def test_json_takes_data_uris_and_base64_and_gives_either_encoding(
    caller: Caller, pool: EncoderPool, pictures: list[bytes]
) -> None:
    plain = base64.b64encode(pictures[0]).decode()
    items = [plain, f"data:image/png;base64,{plain}", {"data": plain, "id": "x"}, {"url": f"data:;base64,{plain}"}]
    same = expected(pool, pictures[0])
    for encoding in ("base64", "float"):
        reply = caller.json(items=items, encoding=encoding)
        assert reply.status == 200
        for item in reply.items:
            data = item["data"]
            found = np.frombuffer(base64.b64decode(data), "<f4") if encoding == "base64" else np.array(data, "f4")
            np.testing.assert_allclose(found.reshape(item["shape"]), same, rtol=1e-5, atol=1e-5)
    assert [item.get("id") for item in reply.items] == [None, None, "x", None]


def form(parts: list[tuple[str, str | None, bytes]]) -> tuple[bytes, str]:
    body = b""
    for name, file, data in parts:
        named = "" if file is None else f'; filename="{file}"'
        body += f'--cut\r\nContent-Disposition: form-data; name="{name}"{named}\r\n\r\n'.encode() + data + b"\r\n"
    return body + b"--cut--\r\n", "multipart/form-data; boundary=cut"


def test_a_form_takes_files_and_options(caller: Caller, pictures: list[bytes]) -> None:
    files = [("image", "a.png", pictures[0]), ("image", "b.jpg", pictures[1])]
    reply = caller.post("/v1/encode", *form([*files, ("timeout_s", None, b"50"), ("encoding", None, b"float")]))
    assert reply.status == 200
    assert [item["id"] for item in reply.items] == ["a.png", "b.jpg"]
    assert isinstance(reply.items[0]["data"][0][0], float)
    for parts, said in [
        ([("image", None, b"text")], "unknown key 'image'"),
        ([("timeout_s", None, b"1")], "the form has no file"),
    ]:
        reply = caller.post("/v1/encode", *form([*files[: said.startswith("unknown")], *parts]))
        assert reply.status == 400
        assert said in reply.error[1]


@pytest.mark.parametrize("kind", [MSGPACK, JSON])
def test_a_stream_gives_each_item_as_it_ends(caller: Caller, pictures: list[bytes], kind: str) -> None:
    if kind == MSGPACK:
        reply = caller.msgpack(items=[*pictures, b"broken"], stream=True)
        unpacker = msgpack.Unpacker()
        unpacker.feed(reply.body)
        *items, end = unpacker
    else:
        reply = caller.json(items=[base64.b64encode(data).decode() for data in [*pictures, b"broken"]], stream=True)
        *items, end = map(json.loads, reply.body.splitlines())
    assert reply.status == 200
    assert sorted(item["index"] for item in items) == list(range(len(pictures) + 1))
    assert items[0]["status"] == 422  # refused at the door, while the others wait for the workers
    assert items[0]["index"] == len(pictures)
    assert end == {"end": True, "num_items": len(pictures) + 1, "num_failed": 1}


def test_many_connections_at_once_each_get_their_own(
    gateway: GatewayThread, pool: EncoderPool, pictures: list[bytes]
) -> None:
    same = [expected(pool, picture) for picture in pictures]

    def ask(number: int) -> None:
        with Caller(gateway.url) as caller:
            for turn in range(3):
                which = (number + turn) % len(pictures)
                (item,) = caller.msgpack(items=[pictures[which]]).items
                np.testing.assert_allclose(tokens(item), same[which], rtol=1e-5, atol=1e-5)

    with ThreadPoolExecutor(16) as threads:
        list(threads.map(ask, range(16)))


# --- errors of items ---


def test_a_bad_item_fails_alone_with_its_own_status(caller: Caller, pictures: list[bytes]) -> None:
    reply = caller.json(
        items=[
            base64.b64encode(pictures[0]).decode(),
            base64.b64encode(pictures[0][:40]).decode(),
            "no base64!",
            "data:image/png,raw",
            "https://example.org/a.png",
        ]
    )
    assert reply.status == 207
    assert reply.statuses == [200, 422, 422, 422, 403]
    assert [item["error"]["type"] for item in reply.items[1:]] == [*["BadMediaError"] * 3, "ForbiddenError"]
    assert "set gateway.media_urls.hosts" in reply.items[4]["error"]["message"]


def test_when_all_items_fail_alike_the_answer_has_their_status(caller: Caller) -> None:
    reply = caller.msgpack(items=[b"no picture", b""])
    assert (reply.status, reply.statuses) == (422, [422, 422])
    assert reply.items[1]["error"]["message"].startswith("the file is empty")


def test_a_deadline_that_passes_is_504(caller: Caller, pool: EncoderPool, pictures: list[bytes]) -> None:
    reply = caller.msgpack(items=[pictures[0]], timeout_s=1e-6)
    assert reply.status == 504
    assert reply.items[0]["error"]["type"] == "DeadlineError"
    wait_idle(pool)


# --- requests that are refused ---


@pytest.mark.parametrize(
    ("status", "kind", "body", "said"),
    [
        (415, "text/plain", b"hello", "send application/msgpack"),
        (415, "image/png", b"\x89PNG", "send application/msgpack"),
        (400, JSON, b"{", "not JSON"),
        (400, JSON, b"[" * 100_000, "not JSON"),
        (400, JSON, b"[1]", "a request is a map"),
        (400, JSON, b"{}", "'items' is a list of images, one at least"),
        (400, JSON, b'{"items": []}', "one at least"),
        (400, JSON, b'{"items": [3]}', "an item is an encoded image, a URL or a map, got an int"),
        (400, JSON, b'{"items": [{"image": "x"}]}', "'data' or 'url'"),
        (400, JSON, b'{"items": ["x"], "strem": true}', "unknown key 'strem', known here: items, v, model"),
        (400, JSON, b'{"items": ["x"], "timeout_s": -1}', "timeout_s: input should be greater than 0"),
        (400, JSON, b'{"items": ["x"], "timeout_s": NaN}', "timeout_s"),
        (400, JSON, b'{"items": ["x"], "v": 2}', "v: input should be 1, got 2"),
        (404, JSON, b'{"items": ["x"], "model": "gpt"}', "served: tiny-minicpmv-2.6"),
        (413, JSON, json.dumps({"items": ["x"] * 300}).encode(), "300 items, the limit is 256"),
        (400, MSGPACK, b"", "cut short"),
        (400, MSGPACK, b"\xc1", "0xc1"),
        (400, MSGPACK, msgpack.packb({"items": [b"x"]})[:-1], "cut short"),
        (400, MSGPACK, msgpack.packb({"items": [b"x"]}) + b"\x00", "after the end"),
        (400, MSGPACK, msgpack.packb({"items": [msgpack.ExtType(1, b"x")]}), "of type 0x"),
        (400, MSGPACK, msgpack.packb({"items": [b"x"], 3: 3}), "keys are text"),
        (400, MSGPACK, b"\xdd\xff\xff\xff\xff", "more values"),
        (400, "multipart/form-data; boundary=cut", b"no form", "form"),
        (400, "multipart/form-data", b"no form", "form"),
    ],
)
def test_what_cannot_be_understood_is_refused_with_a_reason(
    caller: Caller, status: int, kind: str, body: bytes, said: str
) -> None:
    reply = caller.post("/v1/encode", body, kind)
    assert (reply.status, said in reply.error[1]) == (status, True), reply.body
    assert caller.get("/health").status == 200


def test_compressed_bodies_are_refused_unread(caller: Caller) -> None:
    reply = caller.post("/v1/encode", b"x", JSON, {"Content-Encoding": "gzip"})
    assert reply.status == 415
    assert "compressed already" in reply.error[1]


def test_unknown_paths_and_methods_are_json_too(caller: Caller) -> None:
    assert caller.get("/v2/encode").status == 404
    reply = caller.get("/v1/encode")
    assert (reply.status, reply.headers["Allow"]) == (405, "POST")
    assert reply.error[0] == "HTTPError"


# --- gateways with limits ---


@pytest.fixture
def limited(pool: EncoderPool, tmp_path: Path) -> Iterator[GatewayThread]:
    """A gateway that lets three tokens in, and not much of anything."""
    tokens_file = tmp_path / "tokens"
    tokens_file.write_text(
        "# name token rights\n"
        "ann 0123456789abcdef-ann\n"
        "bob 0123456789abcdef-bob encode\n"
        "prometheus 0123456789abcdef-prom watch  # only looks\n"
    )
    config = GatewayConfig(
        port=0,
        tokens_file=tokens_file,
        max_request_bytes=100_000,
        max_request_items=4,
        max_answer_bytes=100 * 64 * 256 * 4,
        max_open_items=6,
        requests_per_s=20,
        max_requests_in_flight=2,
        read_timeout_s=1.0,
    )
    with GatewayThread(pool, config) as gateway:
        yield gateway


ANN, BOB, PROMETHEUS = (f"0123456789abcdef-{name}" for name in ("ann", "bob", "prom"))


def test_only_tokens_that_were_given_out_and_only_what_they_may(limited: GatewayThread, pictures: list[bytes]) -> None:
    def ask(token: str | None) -> Reply:
        with Caller(limited.url, token) as caller:
            return caller.msgpack(items=[pictures[0]])

    for token in (None, "wrong", ANN[:-1], ANN.upper()):
        reply = ask(token)
        assert reply.status == 401
        assert reply.headers["WWW-Authenticate"] == "Bearer"
    assert ask(ANN).status == ask(BOB).status == 200
    reply = ask(PROMETHEUS)
    assert reply.status == 403
    assert reply.error[1] == "the token of 'prometheus' may watch, not encode"
    with Caller(limited.url) as nobody:
        assert nobody.get("/health").status == 200


def test_too_much_of_anything_is_413(limited: GatewayThread, pictures: list[bytes]) -> None:
    with Caller(limited.url, ANN) as caller:
        assert "5 items, the limit is 4" in caller.msgpack(items=[b"x"] * 5).error[1]
        reply = caller.post("/v1/encode", b"x" * 100_001, MSGPACK)
        assert (reply.status, reply.error[0]) == (413, "RequestTooLargeError")
    with Caller(limited.url, ANN) as caller, caller.socket() as bare:  # without a length, so that it has to count
        bare.sendall(
            b"POST /v1/encode HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
            b"Content-Type: application/msgpack\r\nAuthorization: Bearer " + ANN.encode() + b"\r\n\r\n"
        )
        for _ in range(2):
            bare.sendall(b"%x\r\n" % 60_000 + bytes(60_000) + b"\r\n")
        assert bare.recv(12) == b"HTTP/1.1 413"
    with Caller(limited.url, ANN) as caller:
        assert caller.post("/v1/encode", *form([("a", "a.png", bytes(100_001))])).status == 413


def test_who_asks_too_often_is_told_when_to_come_back(limited: GatewayThread) -> None:
    with Caller(limited.url, ANN) as ann, Caller(limited.url, BOB) as bob:
        replies = [ann.msgpack(items=[b"x"]) for _ in range(40)]
        refused = [reply for reply in replies if reply.status == 429]
        assert 0 < len(refused) < 40
        assert refused[0].error[0] == "RateLimitError"
        assert refused[0].headers["Retry-After"] == "1"
        assert bob.msgpack(items=[b"x"]).status == 422  # his own affair


def test_a_body_that_does_not_come_is_given_up(limited: GatewayThread) -> None:
    with Caller(limited.url, ANN) as caller, caller.socket() as bare:
        bare.sendall(
            b"POST /v1/encode HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n"
            b"Content-Type: application/msgpack\r\nAuthorization: Bearer " + ANN.encode() + b"\r\n\r\n"
        )
        started_s = time.monotonic()
        assert bare.recv(12) == b"HTTP/1.1 400"
        assert time.monotonic() - started_s < 5


def test_a_full_gateway_says_429_and_when_to_come_back(
    limited: GatewayThread, pool: EncoderPool, pictures: list[bytes]
) -> None:
    replies: list[Reply] = []

    def ask(token: str) -> None:
        with Caller(limited.url, token) as caller:
            replies.append(caller.msgpack(items=pictures[:4]))

    threads = [threading.Thread(target=ask, args=[token]) for token in (ANN, BOB, ANN, BOB)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    statuses = [reply.status for reply in replies]
    assert set(statuses) == {200, 429}
    refused = replies[statuses.index(429)]
    assert int(refused.headers["Retry-After"]) >= 1
    assert "the limit" in refused.error[1]
    wait_idle(pool)


def test_draining_refuses_what_comes_and_answers_what_is_here(pool: EncoderPool, pictures: list[bytes]) -> None:
    with GatewayThread(pool, GatewayConfig(port=0)) as gateway:
        replies: list[Reply] = []

        def ask() -> None:
            with Caller(gateway.url) as caller:
                replies.append(caller.msgpack(items=pictures * 8))

        with Caller(gateway.url) as late:
            assert late.get("/health").value == {"status": "ok"}
            thread = threading.Thread(target=ask)
            thread.start()
            assert gateway.gateway is not None
            while not gateway.gateway.num_requests:
                time.sleep(0.001)
            answers: list[bool] = []
            drain = threading.Thread(target=lambda: answers.append(gateway.drain()))
            drain.start()
            while late.get("/health").value == {"status": "ok"}:
                time.sleep(0.001)
            reply = late.msgpack(items=[pictures[0]])
            assert (reply.status, reply.headers["Retry-After"]) == (503, "1")
            assert late.get("/ready").status == 503
            drain.join(60)
            thread.join(60)
        assert answers == [True]
        assert [reply.status for reply in replies] == [200]


# --- clients that misbehave ---


def head(length: int) -> bytes:
    return (
        b"POST /v1/encode HTTP/1.1\r\nHost: x\r\nContent-Type: application/msgpack\r\n"
        b"Content-Length: %d\r\n\r\n" % length
    )


def test_work_of_a_client_that_hangs_up_is_dropped(caller: Caller, pool: EncoderPool, pictures: list[bytes]) -> None:
    wait_idle(pool)
    before = pool.stats().num_items
    body = msgpack.packb({"items": [pictures[4]] * 200})
    with caller.socket() as bare:
        bare.sendall(head(len(body)) + body)
        while not any(report.backlog_ms for report in pool.stats().reports):
            time.sleep(0.005)
    wait_idle(pool)
    assert pool.stats().num_items - before < 150  # the others were never sent, or dropped where they waited
    assert caller.msgpack(items=[pictures[0]]).status == 200


def test_a_reader_who_stands_still_is_hung_up_on(pool: EncoderPool, pictures: list[bytes]) -> None:
    config = GatewayConfig(port=0, write_timeout_s=0.5)
    body = msgpack.packb({"items": [pictures[3]] * 200, "stream": True})
    with GatewayThread(pool, config) as gateway, Caller(gateway.url) as caller, caller.socket() as bare:
        bare.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        bare.sendall(head(len(body)) + body)
        assert bare.recv(15) == b"HTTP/1.1 200 OK"
        assert gateway.gateway is not None
        until_s = time.monotonic() + 60
        while gateway.gateway.num_requests:
            assert time.monotonic() < until_s
            time.sleep(0.05)
        assert caller.get("/health").status == 200
    wait_idle(pool)


# --- the rest ---


def test_health_readiness_and_models(caller: Caller) -> None:
    assert caller.get("/health").value == {"status": "ok"}
    until_s = time.monotonic() + 30
    while (reply := caller.get("/ready")).status == 503:
        assert time.monotonic() < until_s
        time.sleep(0.05)
    assert reply.value == {"status": "ready"}
    (model,) = caller.get("/v1/models").value["data"]
    assert (model["id"], model["object"], model["hidden_size"]) == ("tiny-minicpmv-2.6", "model", 256)
    assert model["dtype"] == "float32", "what the workers compute with, not what the configuration says"


def test_an_address_in_use_is_a_clear_error(gateway: GatewayThread, pool: EncoderPool) -> None:
    assert gateway.gateway is not None
    taken = GatewayThread(pool, GatewayConfig(port=gateway.gateway.port))
    with pytest.raises(ConfigError, match=r"cannot listen on 127.0.0.1:\d+"):
        taken.start()
