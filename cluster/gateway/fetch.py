"""Images by URL: only from hosts that the configuration names, and never from a private address.

A name is looked up once and the connection goes to the very address that was checked, so an answer that changes between
the two reaches nothing. Redirects go through the same checks, one by one.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from cluster.gateway.config import MediaUrlConfig
from encoder.errors import BadMediaError, EncoderPoolError, ForbiddenError, MediaTooLargeError

REDIRECTS = (301, 302, 303, 307, 308)
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
PORTS = {"http": 80, "https": 443}

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def is_public(address: Address) -> bool:
    """Whether an address is the internet's: not private, loopback, link-local, reserved or multicast."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo and address.teredo[1])
        if address in NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
        if inner:
            return is_public(inner)
    return address.is_global and not address.is_multicast and not address.is_reserved


class Fetcher:
    """Fetches images. Belongs to one event loop; `close` ends its connections."""

    def __init__(
        self, config: MediaUrlConfig, *, max_bytes: int, may_reach: Callable[[Address], bool] = is_public
    ) -> None:
        self._config = config
        self._max_bytes = max_bytes
        self._may_reach = may_reach
        self._session: aiohttp.ClientSession | None = None
        self._slots = asyncio.Semaphore(config.max_fetches)

    async def fetch(self, url: str) -> bytes:
        """The bytes behind a URL.

        Raises:
            ForbiddenError: a host, scheme or address that is not allowed, at once or after a redirect.
            MediaTooLargeError: more bytes than an image may have.
            BadMediaError: whatever else keeps it from being fetched.
        """
        try:
            async with self._slots, asyncio.timeout(self._config.timeout_s):
                return await self._follow(_parsed(url))
        except TimeoutError:
            raise BadMediaError(f"{_short(url)} was not fetched within {self._config.timeout_s:g} s") from None
        except EncoderPoolError:
            raise
        except Exception as error:  # a stranger's URL: libraries below raise more than they say, such as UnicodeError
            if (refusal := _refusal(error)) is not None:
                raise refusal from error
            raise BadMediaError(f"{_short(url)} could not be fetched: {type(error).__name__}: {error}") from error

    async def close(self) -> None:
        """End the connections."""
        if self._session is not None:
            await self._session.close()

    async def _follow(self, url: URL) -> bytes:
        for _ in range(self._config.max_redirects + 1):
            self._check(url)
            async with self._client().get(url, allow_redirects=False) as answer:
                if answer.status not in REDIRECTS:
                    return await self._read(url, answer)
                url = url.join(_parsed(answer.headers.get("Location", "")))
        raise BadMediaError(f"{_short(url)} is one redirect too many; the limit is {self._config.max_redirects}")

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(resolver=_Resolver(self._may_reach), use_dns_cache=False),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={"Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": "encpool"},
                auto_decompress=False,
            )
        return self._session

    def _check(self, url: URL) -> None:
        """Raises ForbiddenError."""
        config, host = self._config, url.raw_host or ""
        if not config.hosts:
            raise ForbiddenError("URLs are not fetched here: send the image itself, or set gateway.media_urls.hosts")
        if url.scheme not in config.schemes:
            raise ForbiddenError(f"{_short(url)}: only {', '.join(config.schemes)} URLs are fetched")
        if url.user is not None or url.password is not None:
            raise ForbiddenError(f"{_short(url)}: a URL with a name or password is not fetched")
        is_usual = url.port == PORTS.get(url.scheme)
        named = host if is_usual else f"{host}:{url.port}"
        if not any(_matches(pattern, named) or (pattern == "*" and is_usual) for pattern in config.hosts):
            raise ForbiddenError(f"{_short(url)}: {named} is not among gateway.media_urls.hosts")
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return  # a name: the resolver looks
        if not self._may_reach(address):
            raise ForbiddenError(f"{_short(url)}: {host} is no public address")

    async def _read(self, url: URL, answer: aiohttp.ClientResponse) -> bytes:
        if answer.status != 200:
            raise BadMediaError(f"{_short(url)} answers {answer.status} {answer.reason}")
        if answer.headers.get("Content-Encoding", "identity") != "identity":
            raise BadMediaError(f"{_short(url)} comes compressed though nobody asked for that")
        if (answer.content_length or 0) > self._max_bytes:
            raise self._too_large(url, answer.content_length)
        body = bytearray()
        async for chunk in answer.content.iter_any():
            body += chunk
            if len(body) > self._max_bytes:
                raise self._too_large(url, f"more than {self._max_bytes}")
        return bytes(body)

    def _too_large(self, url: URL, size: object) -> MediaTooLargeError:
        return MediaTooLargeError(f"{_short(url)} has {size} bytes, the limit is {self._max_bytes}; send it smaller")


class _Resolver(AbstractResolver):
    """Looks a name up and refuses it when any of its addresses is private."""

    def __init__(self, may_reach: Callable[[Address], bool]) -> None:
        self._may_reach = may_reach

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        found: list[Any] = await asyncio.get_running_loop().getaddrinfo(
            host, port, family=family, type=socket.SOCK_STREAM
        )
        for entry in found:
            if not self._may_reach(ipaddress.ip_address(entry[4][0])):
                raise OSError(f"{host} is {entry[4][0]}, no public address") from ForbiddenError(
                    f"{host} is {entry[4][0]}, which is no public address"
                )
        return [
            ResolveResult(
                hostname=host, host=entry[4][0], port=port, family=entry[0], proto=0, flags=socket.AI_NUMERICHOST
            )
            for entry in found
        ]

    async def close(self) -> None:
        """Nothing is kept."""


def _matches(pattern: str, host: str) -> bool:
    pattern, host = pattern.lower(), host.lower()
    return host.endswith(pattern[1:]) if pattern.startswith("*.") else host == pattern


def _refusal(error: BaseException | None) -> ForbiddenError | None:
    """What the resolver said, in the error that aiohttp made of it."""
    while error is not None and not isinstance(error, ForbiddenError):
        error = error.__cause__ or error.__context__
    return error


def _parsed(url: str) -> URL:
    try:
        return URL(url)
    except ValueError as error:
        raise BadMediaError(f"{_short(url)} is no URL: {error}") from error


def _short(url: object) -> str:
    """Without the query, which may hold a secret."""
    text = str(url).partition("?")[0]
    return text if len(text) <= 200 else f"{text[:200]}..."
