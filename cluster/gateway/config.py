"""`GatewayConfig`: where the gateway listens, who may use it, how much it takes at once. Free of torch and aiohttp."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ByteSize, Field

from cluster.groups import Amount

MAX_S = 1e6


class MediaUrlConfig(BaseModel, frozen=True, extra="forbid"):
    """Which URLs of images the gateway fetches. Private addresses are never reached, whatever the name."""

    hosts: tuple[str, ...] = ()
    """Names of hosts, such as "images.example.org"; "*.example.org" admits what lies below, "*" every public host."""

    schemes: tuple[str, ...] = ("https",)
    """"https", and "http" when you say so."""

    max_redirects: int = Field(default=3, ge=0, le=20)
    """Redirects that are followed; each goes through the same checks."""

    timeout_s: float = Field(default=10.0, gt=0, le=MAX_S)
    """Time for one image, redirects included."""

    max_fetches: int = Field(default=16, ge=1, le=1024)
    """Images that are fetched at once."""


class GatewayConfig(BaseModel, frozen=True, extra="forbid"):
    """One gateway. Several may share a pool; every bound below is each gateway's own."""

    host: str = "127.0.0.1"
    """Address to listen on; "0.0.0.0" for every network, which asks for a `tokens_file` or a proxy with one."""

    port: int = Field(default=8080, ge=0, le=65_535)
    """0: any free one, which the first line of output names."""

    tokens_file: Path | None = None
    """Bearer tokens: a line each with a name, the token, and what it may do if not all ("encode", "watch").
    None: everybody who reaches the gateway may use it."""

    cache_by_token: bool = False
    """Answer a token's items from the workers' caches only with what the same token sent before: otherwise the time
    of an answer tells that somebody else has sent the same picture."""

    max_request_bytes: ByteSize = Field(default=ByteSize(256 * 2**20), ge=1)
    """Bytes of a request's body."""

    max_request_items: int = Field(default=256, ge=1, le=65_536)
    """Items of a request."""

    max_answer_bytes: ByteSize = Field(default=ByteSize(256 * 2**20), ge=1)
    """Bytes of tokens in an answer that is not streamed."""

    max_open_items: int = Field(default=1024, ge=1)
    """Items of all requests that are not answered yet; beyond it requests are refused with 429. One always fits."""

    max_open_bytes: ByteSize = Field(default=ByteSize(1024 * 2**20), ge=1)
    """Bytes of all requests under way, their tokens included. One request always fits."""

    requests_per_s: float | None = Field(default=None, gt=0, le=1e6)
    """Requests a second of one token (without tokens: of one address); a second's worth may come at once. None: any."""

    max_requests_in_flight: int = Field(default=256, ge=1)
    """Requests of one token (without tokens: of one address) under way at once."""

    default_timeout_s: float = Field(default=120.0, gt=0, le=MAX_S)
    """Deadline of a request that names none."""

    read_timeout_s: float = Field(default=60.0, gt=0, le=MAX_S)
    """Time to send a request's body, and on a new connection to send the head of a request at all."""

    write_timeout_s: float = Field(default=60.0, gt=0, le=MAX_S)
    """How long a reader of an answer may stand still before it is hung up on."""

    drain_timeout_s: float = Field(default=30.0, ge=0, le=MAX_S)
    """Time for requests under way when the gateway ends."""

    probe_interval_s: float = Field(default=10.0, gt=0, le=MAX_S)
    """How often a small picture of its own goes through the pool when nothing else does. It is ready while the last
    success is younger than three of these."""

    items_per_call: int = Field(default=4, ge=1, le=1024)
    """Items of any requests that travel to a worker in one call. All of a call return together."""

    calls_per_worker: int = Field(default=8, ge=1, le=64)
    """Calls in flight on each worker."""

    num_cpus: Amount = Field(default=0.0, le=4096)
    """CPU cores that Ray reserves for the gateway when it runs as an actor."""

    media_urls: MediaUrlConfig = MediaUrlConfig()
    """Which URLs of images are fetched. None at all unless hosts are named."""
