"""Images by URL through a real gateway: a real site on this machine, names of our own, every way inside shut."""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
from http_calls import Caller

from cluster import EncoderPool
from cluster.gateway import backend
from cluster.gateway.config import GatewayConfig, MediaUrlConfig
from cluster.gateway.fetch import Address, Fetcher, is_public
from cluster.gateway.item_maps import read_answer_item
from cluster.gateway.threaded import GatewayThread
from cluster.gateway.wire import as_float32

OUTSIDE, INSIDE = "127.0.0.1", "127.0.0.2"
"""The first stands for the internet, the second for what lies behind the gateway."""

NAMES = {"images.test": OUTSIDE, "cdn.test": OUTSIDE, "trap.test": INSIDE, "stranger.test": OUTSIDE}


class Site(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        site: Any = self.server
        site.asked.append((self.connection.getsockname()[0], self.path))
        if self.path.startswith("/to/"):
            self.send_response(302)
            self.send_header("Location", self.path.removeprefix("/to/"))
            self.end_headers()
            return
        self.send_response(200)
        if self.path == "/declared":
            self.send_header("Content-Length", str(2**40))
        self.end_headers()
        try:
            if self.path == "/endless":
                while True:
                    self.wfile.write(bytes(2**20))
            for _ in range(100 if self.path == "/drip" else 0):
                self.wfile.write(b"\x89")
                time.sleep(0.1)
            self.wfile.write(b"<html>" if self.path == "/page" else site.picture)
        except OSError:
            pass

    def log_message(self, *_: object) -> None:
        """Nothing on stderr."""


@pytest.fixture
def site(pictures: list[bytes]) -> Iterator[Any]:
    site: Any = ThreadingHTTPServer(("0.0.0.0", 0), Site)
    site.daemon_threads = True
    site.picture, site.asked = pictures[0], []
    thread = threading.Thread(target=site.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield site
    site.shutdown()
    thread.join()
    site.server_close()


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's own names, in place of a DNS server's."""
    look_up = socket.getaddrinfo

    def looks_up(host: Any, *arguments: Any, **options: Any) -> Any:
        return look_up(NAMES.get(host, host), *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", looks_up)


def config(port: int, **changes: Any) -> GatewayConfig:
    hosts = tuple(f"{name}:{port}" for name in (*NAMES, OUTSIDE, INSIDE) if name != "stranger.test")
    return GatewayConfig(port=0, media_urls=MediaUrlConfig(hosts=hosts, schemes=("http",), **changes))


def is_outside(address: Address) -> bool:
    return is_public(address) or address == ipaddress.ip_address(OUTSIDE)


def test_urls_are_followed_to_allowed_hosts_alone_and_never_inside(
    pool: EncoderPool, pictures: list[bytes], site: Any, names: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "Fetcher", partial(Fetcher, may_reach=is_outside))
    here = f"http://images.test:{site.server_port}"
    there = {name: f"http://{name}:{site.server_port}" for name in (*NAMES, OUTSIDE, INSIDE)}
    wanted = {
        f"{here}/a.png": 200,
        f"{here}/to/{there['cdn.test']}/a.png": 200,
        f"{here}/to/{here}/to/{there[OUTSIDE]}/a.png": 200,
        f"{there['trap.test']}/a.png": 403,  # admitted by name, private by address
        f"{there[INSIDE]}/a.png": 403,
        f"{here}/to/{there['trap.test']}/a.png": 403,
        f"{here}/to/{there[INSIDE]}/a.png": 403,
        f"{here}/to/{there['stranger.test']}/a.png": 403,
        f"{here}/to/https://images.test/a.png": 403,
        f"{there['stranger.test']}/a.png": 403,
        f"{here}/to/{here}/to/{here}/to/{here}/to/{here}/a.png": 422,
        f"{here}/page": 422,
        f"{here}/declared": 413,
        f"{here}/endless": 413,
        f"{here}/drip": 422,
    }
    items: list[Any] = [{"url": url} for url in wanted]
    with GatewayThread(pool, config(site.server_port, timeout_s=3.0)) as gateway, Caller(gateway.url) as caller:
        started_s = time.monotonic()
        reply = caller.msgpack(items=[pictures[0], *items])
        assert time.monotonic() - started_s < 30
    found = {url: item["status"] for url, item in zip(wanted, reply.items[1:], strict=True)}
    assert found == wanted
    same = pool.encode(pictures[0]).tokens.numpy()
    for item in reply.items:
        if item["status"] == 200:
            tokens = read_answer_item(item).tokens
            assert tokens is not None
            np.testing.assert_allclose(as_float32(tokens), same, rtol=1e-5, atol=1e-5)
    messages = {
        url: item["error"]["message"] for url, item in zip(wanted, reply.items[1:], strict=True) if "error" in item
    }
    assert f"trap.test is {INSIDE}, which is no public address" in messages[f"{there['trap.test']}/a.png"]
    assert "not fetched within 3 s" in messages[f"{here}/drip"]
    assert {address for address, _ in site.asked} == {OUTSIDE}, "nothing inside was ever asked"


def test_loopback_is_inside_whatever_the_list_says(
    pool: EncoderPool, pictures: list[bytes], site: Any, names: None
) -> None:
    with GatewayThread(pool, config(site.server_port)) as gateway, Caller(gateway.url) as caller:
        urls = [f"http://{name}:{site.server_port}/a.png" for name in ("images.test", OUTSIDE)]
        reply = caller.msgpack(items=[{"url": url} for url in urls])
    assert reply.statuses == [403, 403]
    assert site.asked == []
