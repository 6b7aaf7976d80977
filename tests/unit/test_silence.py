"""Connections that bring no request take a descriptor each: they are hung up on, and no others are."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from fakes import Clock

from cluster.gateway.config import GatewayConfig
from cluster.gateway.silence import Silence
from cluster.gateway.threaded import GatewayThread

ASKING = b"GET /health HTTP/1.1\r\nHost: here\r\n"


class Line:
    """A connection."""

    is_open = True

    def force_close(self) -> None:
        self.is_open = False


def test_those_that_never_asked_are_hung_up_on_in_time_and_those_that_did_are_not() -> None:
    clock = Clock()
    silence = Silence(10.0, now_s=clock)
    early, asking = Line(), Line()
    silence.look([early, asking])
    silence.heard(asking)
    clock.now += 6
    late = Line()
    silence.look([early, asking, late])
    clock.now += 6
    silence.look([early, asking, late])
    assert [line.is_open for line in (early, asking, late)] == [False, True, True]
    clock.now += 600
    silence.look([asking])
    assert asking.is_open
    assert not silence._since_s, "connections that have ended are remembered"


@pytest.fixture
def port() -> Iterator[int]:
    with GatewayThread(None, GatewayConfig(port=0, read_timeout_s=0.5)) as gateway:
        assert gateway.gateway is not None
        yield gateway.gateway.port


def test_a_gateway_hangs_up_on_who_says_nothing_or_half_a_head_and_keeps_who_has_asked(port: int) -> None:
    with (
        socket.create_connection(("127.0.0.1", port), 20) as asks,
        socket.create_connection(("127.0.0.1", port), 20) as silent,
        socket.create_connection(("127.0.0.1", port), 20) as slow,
    ):
        slow.send(ASKING)
        asks.send(ASKING + b"\r\n")
        assert asks.recv(2**16).startswith(b"HTTP/1.1 200 OK")
        assert (silent.recv(1), slow.recv(1)) == (b"", b"")
        asks.send(ASKING + b"\r\n")
        assert asks.recv(2**16).startswith(b"HTTP/1.1 200 OK")
