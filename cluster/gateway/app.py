"""The HTTP application: its routes, and what every request goes through before and after them."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from aiohttp import web

from cluster.gateway.answers import SlowReader, error_response
from cluster.gateway.config import GatewayConfig
from cluster.gateway.door import Door
from cluster.gateway.embeddings import embeddings
from cluster.gateway.encode import encode
from cluster.gateway.forms import expect_bad_headers
from cluster.gateway.limits import Refused
from cluster.gateway.live import POLICY, Watch, metrics_text, read_page
from cluster.gateway.openapi import describe, docs_page
from cluster.gateway.silence import KEEPALIVE_S, Silence
from cluster.pool import EncoderPool
from encoder.errors import EncodeError, EncoderPoolError
from workers import spans
from workers.prometheus import CONTENT_TYPE as PROMETHEUS

logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

HUNG_UP = 499  # what others call the status of a request whose client left; nobody is sent it


class Gateway:
    """One HTTP front door. Everything but the dispatcher belongs to one event loop."""

    def __init__(self, config: GatewayConfig) -> None:
        """Reads the tokens file. Raises ConfigError when there is something wrong with it."""
        self.config = config
        self.port = config.port
        self.door = Door(config)
        self._watch = Watch(self.door)
        self._silence = Silence(config.read_timeout_s)
        self._runner: web.AppRunner | None = None
        self._watching: asyncio.Task[None] | None = None

    @property
    def num_requests(self) -> int:
        """Requests under way."""
        return self.door.room.num_requests

    # --- life ----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Listen; `port` then is the one that was found. Until `attach` there is no pool: 503.

        Raises OSError when the address is taken.
        """
        expect_bad_headers()
        app = web.Application(middlewares=[self._around])
        app.on_response_prepare.append(_name_server)
        app.add_routes(
            [
                web.post("/v1/encode", partial(encode, self.door)),
                web.post("/v1/embeddings", partial(embeddings, self.door)),
                web.get("/v1/models", self.models),
                web.get("/health", self.health),
                web.get("/ready", self.ready),
                web.get("/metrics", self.metrics),
                web.get("/v1/stats", self.stats),
                web.get("/openapi.json", self.openapi),
                web.get("/docs", self.docs),
                web.get("/", self.page),
            ]
        )
        self._runner = web.AppRunner(
            app,
            access_log=None,
            logger=_Strangers(logger),
            handler_cancellation=True,  # a client that hangs up ends its handler, which drops its queued work
            read_bufsize=2**20,
            shutdown_timeout=1.0,
            keepalive_timeout=KEEPALIVE_S,
        )
        await self._runner.setup()
        server = self._runner.server
        assert server is not None
        self._watching = asyncio.create_task(self._silence.watch(lambda: server.connections))
        site = web.TCPSite(self._runner, self.config.host, self.config.port, backlog=1024)
        await site.start()
        self.port = self._runner.addresses[0][1]

    def attach(self, pool: EncoderPool) -> None:
        """Serve this pool from now on. It stays the caller's."""
        self.door.attach(pool)

    async def drain(self) -> bool:
        """Refuse what comes and wait for what is here; whether all of it was answered in time."""
        self.door.is_draining = True
        until_s = time.monotonic() + self.config.drain_timeout_s
        while self.num_requests and time.monotonic() < until_s:
            await asyncio.sleep(0.02)
        return not self.num_requests

    async def close(self) -> None:
        """Hang up and end."""
        self.door.is_draining = True
        if self._watching is not None:
            self._watching.cancel()
        if self._runner is not None:
            await self._runner.cleanup()
        await self.door.close()

    # --- routes --------------------------------------------------------------------------------------------------

    async def models(self, request: web.Request) -> web.StreamResponse:
        """`GET /v1/models`."""
        self.door.caller(request, "encode")
        models = self.door.backend().models
        dtypes = await self._watch.dtypes()
        for model in models:
            model["dtype"] = dtypes.get(str(model["id"]), model["dtype"])
        return web.json_response({"object": "list", "data": models})

    async def health(self, request: web.Request) -> web.StreamResponse:
        """`GET /health`: this process answers."""
        return web.json_response({"status": self.door.state})

    async def ready(self, request: web.Request) -> web.StreamResponse:
        """`GET /ready`: a worker encoded something a short while ago."""
        self.door.backend().check_ready()
        return web.json_response({"status": "ready"})

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        """`GET /metrics`, for Prometheus."""
        self.door.caller(request, "watch")
        text = await asyncio.to_thread(metrics_text, self.door.pool, self.door.counters)
        return web.Response(body=text.encode(), headers={"Content-Type": PROMETHEUS})

    async def stats(self, request: web.Request) -> web.StreamResponse:
        """`GET /v1/stats`, for the live page."""
        self.door.caller(request, "watch")
        return web.json_response(await self._watch.stats())

    async def page(self, request: web.Request) -> web.StreamResponse:
        """`GET /`: the live page, which asks for `/v1/stats`."""
        return web.Response(text=read_page(), content_type="text/html", headers={"Content-Security-Policy": POLICY})

    async def openapi(self, request: web.Request) -> web.StreamResponse:
        """`GET /openapi.json`."""
        return web.json_response(describe())

    async def docs(self, request: web.Request) -> web.StreamResponse:
        """`GET /docs`: the same for people."""
        return web.Response(text=docs_page(), content_type="text/html", headers={"Content-Security-Policy": POLICY})

    # --- before and after ----------------------------------------------------------------------------------------

    @web.middleware
    async def _around(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Count every request, trace those that want something encoded, and answer what a route raises."""
        self._silence.heard(request.protocol)
        resource = request.match_info.route.resource
        route = "other" if resource is None else resource.canonical
        started_s, status = time.monotonic(), HUNG_UP
        try:
            if request.method == "POST":
                response = await self._traced(route, request, handler)
            else:
                response = await self._answered(request, handler)
            status = response.status
            return response
        finally:
            self.door.counters.request(route, status, time.monotonic() - started_s)

    async def _traced(self, route: str, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer within a span, below the caller's if there is one; the items of the request find it as the current."""
        status = HUNG_UP
        with spans.serving(f"POST {route}", request.headers.get("traceparent", "")) as span:
            try:
                response = await self._answered(request, handler)
                status = response.status
                return response
            finally:
                if span is not None:
                    span.set_attributes({"http.route": route, "http.response.status_code": status})

    async def _answered(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except Refused as refused:
            return self._refuse(refused.error, refused.retry_after_s)
        except EncoderPoolError as error:
            return self._refuse(error)
        except web.HTTPException as error:  # aiohttp's own: no such path, no such method
            body = {"error": {"type": "HTTPError", "message": error.reason, "code": error.status, "param": None}}
            allow = error.headers.get("Allow")
            return web.json_response(body, status=error.status, headers={"Allow": allow} if allow else {})
        except (ConnectionError, SlowReader) as error:
            logger.info("%s %s: the client is gone: %s", request.method, request.path, error)
            raise
        except Exception as error:  # edge of the process
            logger.exception("%s %s failed", request.method, request.path)
            return self._refuse(EncodeError(f"the gateway failed: {type(error).__name__}"))

    def _refuse(self, error: EncoderPoolError, retry_after_s: int | None = None) -> web.Response:
        response = error_response(error, retry_after_s)
        self.door.recent.note(response.status, type(error).__name__, str(error))
        return response


class _Strangers(logging.LoggerAdapter[logging.Logger]):
    """What aiohttp says of bytes that are no HTTP and of readers that are gone: no errors of ours, and no traces."""

    def log(self, level: int, msg: object, *args: object, **options: Any) -> None:
        reason = sys.exc_info()[1]
        super().log(min(level, logging.INFO), "a connection: %.200s", reason or msg)


async def _name_server(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = "encpool"  # no versions for strangers
