"""Plain HTTP calls of tests: what goes out and comes back is seen as it is."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import msgpack

from cluster.gateway.wire import JSON, MSGPACK

TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Reply:
    """An answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def value(self) -> Any:
        """The body understood."""
        kind = self.headers.get("Content-Type", "").partition(";")[0]
        return msgpack.unpackb(self.body) if kind == MSGPACK else json.loads(self.body)

    @property
    def items(self) -> list[dict[str, Any]]:
        """Items of a whole answer."""
        found: list[dict[str, Any]] = self.value["items"]
        return found

    @property
    def statuses(self) -> list[int]:
        """Of its items."""
        return [item["status"] for item in self.items]

    @property
    def error(self) -> tuple[str, str]:
        """Type and message of a refusal."""
        error = self.value["error"]
        return error["type"], error["message"]


class Caller:
    """One connection, used over and over."""

    def __init__(self, url: str, token: str | None = None) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        self.host, self.port = parts.hostname, parts.port
        self.headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self.connection = HTTPConnection(self.host, self.port, timeout=TIMEOUT_S)

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()

    def get(self, path: str) -> Reply:
        return self._call("GET", path, None, {})

    def post(self, path: str, body: bytes | str, content_type: str, headers: dict[str, str] | None = None) -> Reply:
        return self._call("POST", path, body, {"Content-Type": content_type, **(headers or {})})

    def json(self, path: str = "/v1/encode", /, **values: object) -> Reply:
        return self.post(path, json.dumps(values), JSON)

    def msgpack(self, path: str = "/v1/encode", /, **values: object) -> Reply:
        return self.post(path, msgpack.packb(values), MSGPACK)

    def socket(self) -> socket.socket:
        """A bare connection."""
        return socket.create_connection((self.host, self.port), timeout=TIMEOUT_S)

    def _call(self, method: str, path: str, body: bytes | str | None, headers: dict[str, str]) -> Reply:
        self.connection.request(method, path, body, {**self.headers, **headers})
        answer = self.connection.getresponse()
        return Reply(status=answer.status, headers=dict(answer.headers), body=answer.read())
