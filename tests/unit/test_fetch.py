"""Images by URL, from a server on this machine; what is private is refused unless the test lets it pass."""

from __future__ import annotations

import asyncio
import ipaddress
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from cluster.gateway.config import MediaUrlConfig
from cluster.gateway.fetch import Fetcher, is_public
from encoder.errors import BadMediaError, ForbiddenError, MediaTooLargeError

PICTURE = b"picture" * 100


class Site(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        path = self.path
        if path.startswith("/to/"):
            self.send_response(302)
            self.send_header("Location", path.removeprefix("/to/"))
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        time.sleep({"/slow": 1.0, "/soon": 0.4}.get(path, 0.0))
        self.send_response(404 if path == "/gone" else 200)
        if path == "/packed":
            self.send_header("Content-Encoding", "gzip")
        if path not in ("/endless", "/slow"):
            self.send_header("Content-Length", str(len(PICTURE)))
        self.end_headers()
        try:
            for _ in range(10_000 if path == "/endless" else 1):
                self.wfile.write(PICTURE)
        except OSError:
            pass

    def log_message(self, *_: object) -> None:
        """Nothing on stderr."""


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Site)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


def fetch(url: str, *, may_reach: Callable[[Any], bool] = is_public, max_bytes: int = 10_000, **options: Any) -> bytes:
    async def run() -> bytes:
        fetcher = Fetcher(MediaUrlConfig(**options), max_bytes=max_bytes, may_reach=may_reach)
        try:
            return await fetcher.fetch(url)
        finally:
            await fetcher.close()

    return asyncio.run(run())


def local(port: int, path: str, **options: Any) -> bytes:
    """From the site, whose address the test admits."""
    hosts = (f"localhost:{port}", f"127.0.0.1:{port}")
    options = {"hosts": hosts, "schemes": ("http",), "may_reach": lambda address: True, **options}
    return fetch(f"http://localhost:{port}{path}", **options)


def test_an_image_has_its_time_from_when_its_turn_has_come(port: int) -> None:
    config = MediaUrlConfig(hosts=(f"localhost:{port}",), schemes=("http",), max_fetches=1, timeout_s=1.0)

    async def run() -> list[bytes]:
        fetcher = Fetcher(config, max_bytes=10_000, may_reach=lambda address: True)
        try:
            return await asyncio.gather(*(fetcher.fetch(f"http://localhost:{port}/soon") for _ in range(4)))
        finally:
            await fetcher.close()

    assert asyncio.run(run()) == [PICTURE] * 4


def test_an_image_is_fetched_also_through_redirects_among_the_hosts_named(port: int) -> None:
    assert local(port, "/a.png") == PICTURE
    assert local(port, "/to//a.png") == PICTURE
    assert local(port, f"/to/http://127.0.0.1:{port}/to//a.png") == PICTURE


@pytest.mark.parametrize(
    ("path", "options", "error", "said"),
    [
        ("/gone", {}, BadMediaError, "answers 404"),
        ("/packed", {}, BadMediaError, "compressed"),
        ("/a.png", {"max_bytes": 100}, MediaTooLargeError, "700 bytes, the limit is 100"),
        ("/endless", {}, MediaTooLargeError, "more than 10000"),
        ("/slow", {"timeout_s": 0.2}, BadMediaError, "not fetched within 0.2 s"),
        ("/to//to//to//a.png", {"max_redirects": 2}, BadMediaError, "one redirect too many"),
        ("/to/http://example.org/", {}, ForbiddenError, "example.org is not among"),
        ("/to/file:///etc/passwd", {}, ForbiddenError, "only http URLs"),
        ("/to/", {}, BadMediaError, "redirect"),
        ("/a.png", {"hosts": ()}, ForbiddenError, "URLs are not fetched here"),
        ("/a.png", {"hosts": ("*",)}, ForbiddenError, "is not among"),  # not this port
        ("/a.png", {"may_reach": is_public}, ForbiddenError, "which is no public address"),
    ],
)
def test_what_is_not_allowed_is_refused(
    port: int, path: str, options: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        local(port, path, **options)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("https://127.0.0.1/a.png", "no public address"),
        ("https://[::1]/a.png", "no public address"),
        ("https://[::ffff:10.0.0.1]/a.png", "no public address"),
        ("https://169.254.169.254/latest/meta-data", "no public address"),
        ("https://name:word@example.org/", "a name or password"),
        ("https://example.org:22/", "not among"),
        ("http://example.org/", "only https URLs"),
    ],
)
def test_urls_that_lead_inside_are_refused_though_every_host_is_admitted(url: str, said: str) -> None:
    with pytest.raises(ForbiddenError, match=said):
        fetch(url, hosts=("*",))


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True),
        ("2606:4700::1111", True),
        ("10.1.2.3", False),
        ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("255.255.255.255", False),
        ("fe80::1", False),
        ("fc00::1", False),
        ("::ffff:192.168.0.1", False),
        ("64:ff9b::a00:1", False),  # 10.0.0.1 behind NAT64
        ("64:ff9b::808:808", True),
        ("2002:7f00:1::", False),  # 127.0.0.1 in 6to4
    ],
)
def test_private_addresses_are_known(address: str, public: bool) -> None:
    assert is_public(ipaddress.ip_address(address)) is public


def test_a_pattern_admits_what_lies_below_a_name() -> None:
    for url in ("https://example.org/", "https://evil-example.org/"):
        with pytest.raises(ForbiddenError, match="not among"):
            fetch(url, hosts=("*.example.org",))


@pytest.mark.parametrize(
    "url", ["http://a..b/", "http://.a/", f"http://{'a' * 64}.b/", "http://a/\udcff", "http://[::1", "http://"]
)
def test_a_name_that_is_none_is_a_bad_item_at_once(url: str) -> None:
    with pytest.raises((BadMediaError, ForbiddenError)):
        fetch(url, hosts=("*",), schemes=("http",))
