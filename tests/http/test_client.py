"""The HTTP client against a real gateway, and against gateways that put it off."""

from __future__ import annotations

import asyncio
import gc
import json
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from cluster import EncoderPool
from cluster.cli import main
from cluster.gateway.config import GatewayConfig
from cluster.gateway.item_maps import msgpack_answer
from cluster.gateway.threaded import GatewayThread
from cluster.gateway.wire import MSGPACK, EncodeOptions, ItemAnswer, ItemTokens
from cluster.http_client import AsyncHttpClient, HttpClient, error_of
from encoder.errors import (
    BadMediaError,
    DeadlineError,
    PoolClosedError,
    PoolError,
    PoolSaturatedError,
    RequestTooLargeError,
    UnauthorizedError,
)


@pytest.fixture
def client(gateway: GatewayThread) -> Iterator[HttpClient]:
    with HttpClient(gateway.url, items_per_request=3, max_connections=2) as client:
        yield client


def test_one_image_and_many_in_order_as_the_pool_encodes_them(
    client: HttpClient, pool: EncoderPool, pictures: list[bytes], tmp_path: Path
) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(pictures[0])
    torch.testing.assert_close(client.encode(file).torch(), pool.encode(file).tokens, rtol=1e-5, atol=1e-5)
    sources = [file, *pictures, b"broken", tmp_path / "gone.png", *pictures[:4]]
    answers = list(client.encode_many(iter(sources)))
    assert [answer.index for answer in answers] == list(range(len(sources)))
    assert [answer.status for answer in answers] == [200] * 7 + [422] * 2 + [200] * 4
    assert isinstance(error_of(answers[7]), BadMediaError)
    assert "gone.png cannot be read: No such file" in answers[8].message
    for source, answer in zip(sources, answers, strict=True):
        if answer.tokens is not None:
            same = pool.encode(source).tokens.numpy()
            np.testing.assert_allclose(answer.tokens.numpy(), same, rtol=1e-5, atol=1e-5)


def test_what_is_too_much_for_one_request_is_asked_in_several_and_too_large_an_item_fails_alone(
    pool: EncoderPool, pictures: list[bytes]
) -> None:
    limit = max(map(len, pictures)) + 1000
    sources = [*pictures, b"x" * limit, *pictures]
    config = GatewayConfig(port=0, max_request_items=2, max_request_bytes=limit)
    with GatewayThread(pool, config) as gateway, HttpClient(gateway.url) as client:
        answers = list(client.encode_many(sources))
        with pytest.raises(
            RequestTooLargeError, match=f"the limit is {limit}; send .* raise gateway.max_request_bytes"
        ):
            client.encode(b"x" * limit)
    assert [answer.index for answer in answers] == list(range(len(sources)))
    assert [answer.status for answer in answers] == [200] * len(pictures) + [413] + [200] * len(pictures)
    assert isinstance(error_of(answers[len(pictures)]), RequestTooLargeError)
    for source, answer in zip(sources, answers, strict=True):
        if answer.tokens is not None:
            assert answer.tokens.grids == pool.encode(source).shape.grids


def test_a_proxy_that_takes_no_request_so_large_is_asked_in_two(moody: Any) -> None:
    moody.script = ["proxy"]
    with HttpClient(f"http://127.0.0.1:{moody.server_port}", max_connections=1) as client:
        assert [answer.status for answer in client.encode_many([b"a", b"b"])] == [200, 200]
        moody.script = ["proxy"]
        with pytest.raises(RequestTooLargeError, match=r"http://127.0.0.1:\d+ takes no request so large"):
            client.encode(b"x")
    assert moody.num_asked == 4


def test_errors_are_raised_with_their_type(client: HttpClient, gateway: GatewayThread, pictures: list[bytes]) -> None:
    with pytest.raises(BadMediaError, match="the file is text"):
        client.encode(b"hello")
    with HttpClient(gateway.url, options=EncodeOptions(timeout_s=1e-6)) as hasty, pytest.raises(DeadlineError):
        hasty.encode(pictures[0])
    with HttpClient("http://127.0.0.1:9", patience_s=0.3) as nobody, pytest.raises(PoolError, match="does not answer"):
        nobody.encode(pictures[0])


def test_a_stream_gives_items_as_they_end(client: HttpClient, pictures: list[bytes]) -> None:
    answers = list(client.stream([b"broken", *pictures]))
    assert sorted(answer.index for answer in answers) == list(range(len(pictures) + 1))
    assert [answer.index for answer in answers if answer.tokens is None] == [0]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("error", [LookupError("no more"), SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_what_was_taken_before_the_sources_raised_is_answered_first(
    client: HttpClient, pictures: list[bytes], error: BaseException
) -> None:
    def sources() -> Iterator[bytes]:
        yield from pictures[:5]
        raise error

    answers = client.encode_many(sources())
    assert [next(answers).status for _ in range(5)] == [200] * 5
    with pytest.raises(type(error)):
        next(answers)
    assert client.encode(pictures[0]).shape, "the client goes on"


def test_sources_on_the_event_loop_may_raise_as_well(gateway: GatewayThread, pictures: list[bytes]) -> None:
    async def sources() -> AsyncIterator[bytes]:
        for picture in pictures[:3]:
            yield picture
        raise LookupError("no more")

    async def encode() -> None:
        async with AsyncHttpClient(gateway.url) as client:
            answers = client.encode_many(sources())
            assert [(await anext(answers)).status for _ in range(3)] == [200] * 3
            with pytest.raises(LookupError, match="no more"):
                await anext(answers)

    asyncio.run(encode())


def test_a_source_that_is_none_fails_alone_and_a_single_one_is_no_list(
    client: HttpClient, pictures: list[bytes]
) -> None:
    released = memoryview(pictures[0])
    released.release()
    sources: list[Any] = [pictures[0], None, 5, "/dev/zero", "a\0b", released, bytearray(pictures[1])]
    answers = list(client.encode_many(sources))
    assert [answer.status for answer in answers] == [200, *[422] * 5, 200]
    assert answers[1].message == "a source is a path or a file's bytes, got nothing"
    for single in (pictures[0], "photo.png", Path("photo.png")):
        with pytest.raises(TypeError, match="takes many"):
            client.encode_many(single)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="takes many"):
            client.stream(single)  # type: ignore[arg-type]


def test_a_client_that_nobody_closes_ends_with_its_last_reference(
    gateway: GatewayThread, pictures: list[bytes]
) -> None:
    client = HttpClient(gateway.url)
    answers = client.encode_many(pictures * 3)
    next(answers)
    thread = client._thread
    del client, answers
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_a_stream_left_early_drops_its_work(gateway: GatewayThread, pictures: list[bytes]) -> None:
    async def first() -> int:
        async with AsyncHttpClient(gateway.url) as client:
            answers = client.stream(pictures * 30)
            answer = await anext(answers)
            await answers.aclose()
            return answer.status

    assert asyncio.run(first()) == 200
    assert gateway.gateway is not None
    for _ in range(300):
        if not gateway.gateway.num_requests:
            return
        threading.Event().wait(0.05)
    raise AssertionError("the request goes on")


# --- a gateway that puts off ---


class Moody(BaseHTTPRequestHandler):
    """Answers as its script says, then well."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        server: Any = self.server
        if not server.script:
            self.send_error(501)
        elif (mood := server.script.pop(0)) == "models":
            self._answer(200, "application/json", json.dumps({"data": server.models}).encode())
        else:
            self._refuse(int(mood))

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        server: Any = self.server
        server.num_asked += 1
        mood = server.script.pop(0) if server.script else "well"
        if mood == "hang up":
            self.close_connection = True
            return
        if mood == "wait":
            server.waiting.set()
            server.go_on.wait(20)
            mood = "well"
        if mood == "well":
            tokens = ItemTokens(dtype="float32", shape=(1, 2), data=np.ones(2, "<f4").tobytes(), grids=((1, 1, 1),))
            well = ItemAnswer(index=0, status=200, tokens=tokens)
            self._answer(200, MSGPACK, b"".join(msgpack_answer("m", [well])))
        elif mood == "item full":
            late = ItemAnswer(index=0, status=429, error="PoolSaturatedError", message="full")
            self._answer(429, MSGPACK, b"".join(msgpack_answer("m", [late])))
        elif mood == "proxy":
            self._answer(413, "text/html", b"<h1>413 Request Entity Too Large</h1>")
        else:
            self._refuse(int(mood))

    def _refuse(self, status: int) -> None:
        error = {"error": {"type": "PoolSaturatedError", "message": "full"}}
        self._answer(status, "application/json", json.dumps(error).encode())

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if status in (429, 503):
            self.send_header("Retry-After", "1")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing on stderr."""


@pytest.fixture
def moody() -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Moody)
    server.daemon_threads = True
    server.script, server.num_asked, server.models = [], 0, []
    server.waiting, server.go_on = threading.Event(), threading.Event()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.go_on.set()
    server.shutdown()
    thread.join()
    server.server_close()


def test_answers_left_half_read_end_with_their_client(moody: Any) -> None:
    with HttpClient(f"http://127.0.0.1:{moody.server_port}", items_per_request=1, max_connections=2) as client:
        answers = client.encode_many([b"picture"] * 8)
        assert next(answers).status == 200
    answers.close()
    with pytest.raises(PoolClosedError, match="this client is closed"):
        client.encode(b"picture")


def test_a_thread_that_waits_hears_that_its_client_was_closed(moody: Any) -> None:
    moody.script = ["wait"]
    client = HttpClient(f"http://127.0.0.1:{moody.server_port}")
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(client.encode, b"picture")
        assert moody.waiting.wait(20)
        client.close()
        with pytest.raises(PoolClosedError, match="closed meanwhile"):
            waiting.result(20)


@pytest.mark.timeout(60)
def test_ctrl_c_while_the_gateway_works_ends_the_command_as_it_should(
    moody: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moody.models, moody.script = [{"id": "one", "dtype": "float32"}], ["models", "wait"]
    picture = tmp_path / "a.png"
    picture.write_bytes(b"any")
    main_thread = threading.main_thread().ident
    assert main_thread is not None

    def press() -> None:
        assert moody.waiting.wait(20)
        signal.pthread_kill(main_thread, signal.SIGINT)

    with ThreadPoolExecutor(1) as threads:
        threads.submit(press)
        url = f"http://127.0.0.1:{moody.server_port}"
        assert main(["encode", str(picture), "--out", str(tmp_path / "out"), "--url", url]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_what_is_put_off_or_lost_is_asked_again(moody: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr("cluster.http_client.patience.sleep", sleep)
    moody.script = ["503", "429", "item full", "hang up"]
    with HttpClient(f"http://127.0.0.1:{moody.server_port}") as client:
        assert client.encode(b"x").numpy().tolist() == [[1.0, 1.0]]
    assert moody.num_asked == 5
    assert all(1 <= pause <= 1.25 for pause in pauses[:3])  # as told, spread a little
    assert pauses[3] < 1.25


@pytest.mark.parametrize(
    ("models", "said"),
    [
        (["one"], "1 items in"),
        (["one", "other"], "the gateway has several models; name one with --encoder: one, other"),
    ],
)
def test_the_command_waits_for_a_gateway_that_starts_and_asks_which_of_several_models(
    moody: Any, models: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moody.models = [{"id": model, "dtype": "float32"} for model in models]
    moody.script = ["503", "models"]
    picture = tmp_path / "a.png"
    picture.write_bytes(b"any")
    url = f"http://127.0.0.1:{moody.server_port}"
    assert main(["encode", str(picture), "--out", str(tmp_path / "out"), "--url", url]) == 2 * (len(models) > 1)
    captured = capsys.readouterr()
    assert said in captured.out + captured.err


def test_patience_ends(moody: Any) -> None:
    for mood in ("429", "item full"):
        moody.script = [mood] * 9
        client = HttpClient(f"http://127.0.0.1:{moody.server_port}", patience_s=0.5)
        with client, pytest.raises(PoolSaturatedError, match="full"):
            client.encode(b"x")
    assert moody.num_asked == 2


def test_a_server_that_is_no_gateway_is_named(moody: Any) -> None:
    client = HttpClient(f"http://127.0.0.1:{moody.server_port}")
    with client, pytest.raises(PoolError, match="is it a gateway"):
        client.models()


# --- the command ---


def test_the_command_encodes_through_a_gateway(
    pool: EncoderPool,
    pictures: list[bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    photos, out = tmp_path / "photos", tmp_path / "out"
    photos.mkdir()
    for number, picture in enumerate(pictures[:3]):
        (photos / f"{number}.png").write_bytes(picture)
    (photos / "3.png").write_bytes(b"broken")
    tokens_file = tmp_path / "tokens"
    tokens_file.write_text("me 0123456789abcdef\n")
    with GatewayThread(pool, GatewayConfig(port=0, tokens_file=tokens_file)) as gateway:
        command = ["encode", str(photos), "--out", str(out), "--url", gateway.url]
        assert main(command) == 1
        assert "the gateway asks for a token; set ENCPOOL_TOKEN" in capsys.readouterr().err
        monkeypatch.setenv("ENCPOOL_TOKEN", "fedcba9876543210")
        assert main(command) == 1
        assert "does not know the token in ENCPOOL_TOKEN" in capsys.readouterr().err
        monkeypatch.setenv("ENCPOOL_TOKEN", "0123456789abcdef")
        assert main([*command, "--overwrite"]) == 1
    captured = capsys.readouterr()
    assert "4 items in" in captured.out
    assert "1 failed" in captured.out
    lines = [json.loads(line) for line in (out / "manifest.jsonl").read_text().splitlines()]
    assert [line["status"] for line in lines] == ["ok", "ok", "ok", "error"]
    for line, picture in zip(lines[:3], pictures, strict=False):
        with safe_open(out / line["part"], framework="pt") as part:
            tokens = part.get_tensor(line["id"])
        torch.testing.assert_close(tokens, pool.encode(picture).tokens, rtol=1e-5, atol=1e-5)
    assert main([*command, "--overwrite", "--workers", "2"]) == 2
    assert "--workers is the gateway's affair" in capsys.readouterr().err


def test_a_wrong_token_is_raised_at_once(pool: EncoderPool, tmp_path: Path) -> None:
    tokens_file = tmp_path / "tokens"
    tokens_file.write_text("me 0123456789abcdef\n")
    with (
        GatewayThread(pool, GatewayConfig(port=0, tokens_file=tokens_file)) as gateway,
        HttpClient(gateway.url, token="wrong") as client,
        pytest.raises(UnauthorizedError),
    ):
        list(client.encode_many([b"x"]))
