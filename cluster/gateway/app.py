"""The HTTP application: its routes, and what every request goes through before and after them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing

from aiohttp import web

from cluster.gateway.answers import SlowReader, error_response, send_stream, send_whole
from cluster.gateway.auth import Caller, TokenBook, read_tokens, require
from cluster.gateway.bodies import read_encode_request
from cluster.gateway.config import GatewayConfig
from cluster.gateway.dispatch import Dispatcher
from cluster.gateway.fetch import Fetcher
from cluster.gateway.limits import CallerLimits, Refused, Room, Share
from cluster.gateway.readiness import Readiness
from cluster.gateway.work import Work
from cluster.pool import EncoderPool
from cluster.wire import EncodeRequest
from encoder.errors import EncodeError, EncoderPoolError, PoolClosedError, UnknownModelError

logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Gateway:
    """One HTTP front door of a pool. Everything but the dispatcher belongs to one event loop."""

    def __init__(self, pool: EncoderPool, config: GatewayConfig) -> None:
        """Reads the tokens file. Raises ConfigError when there is something wrong with it."""
        self.config = config
        self.pool = pool
        self._tokens: TokenBook | None = None if config.tokens_file is None else read_tokens(config.tokens_file)
        self._limits = CallerLimits(config)
        self._room = Room(config)
        self._dispatcher = Dispatcher(pool.client, config)
        self._fetcher = Fetcher(config.media_urls, max_bytes=pool.config.worker.encoder.max_bytes)
        self._readiness = Readiness(self._dispatcher, config)
        self._draining = False
        self._runner: web.AppRunner | None = None
        self.port = config.port

    @property
    def num_requests(self) -> int:
        """Requests under way."""
        return self._room.num_requests

    # --- life ----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Listen; `port` then is the one that was found. Raises OSError when the address is taken."""
        app = web.Application(middlewares=[self._answer_errors])
        app.add_routes(
            [
                web.post("/v1/encode", self.encode),
                web.get("/v1/models", self.models),
                web.get("/health", self.health),
                web.get("/ready", self.ready),
            ]
        )
        self._dispatcher.start()
        self._readiness.start()
        self._runner = web.AppRunner(
            app,
            access_log=None,
            handler_cancellation=True,  # a client that hangs up ends its handler, which drops its queued work
            read_bufsize=2**20,
            shutdown_timeout=1.0,
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.config.host, self.config.port, backlog=1024)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def drain(self) -> bool:
        """Refuse what comes and wait for what is here; whether all of it was answered in time."""
        self._draining = True
        until_s = time.monotonic() + self.config.drain_timeout_s
        while self.num_requests and time.monotonic() < until_s:
            await asyncio.sleep(0.02)
        return not self.num_requests

    async def close(self) -> None:
        """Hang up and end."""
        self._draining = True
        await self._readiness.close()
        if self._runner is not None:
            await self._runner.cleanup()
        await self._fetcher.close()
        self._dispatcher.close()

    # --- routes --------------------------------------------------------------------------------------------------

    async def encode(self, request: web.Request) -> web.StreamResponse:
        """`POST /v1/encode`."""
        arrived_s = time.monotonic()
        caller = self._caller(request, "encode")
        self._check_open()
        config = self.config
        with self._limits.request(caller.name), self._room.request() as share:
            share.take()  # before the body is read
            asked = await read_encode_request(
                request,
                share,
                max_bytes=config.max_request_bytes,
                max_items=config.max_request_items,
                timeout_s=config.read_timeout_s,
            )
            model = self._model(asked.options.model)
            work = await self._begin(asked, share, arrived_s)
            as_msgpack = "msgpack" in request.content_type
            encoding = asked.options.encoding
            if asked.options.stream:
                return await send_stream(
                    request,
                    work.answers(),
                    encoding=encoding,
                    as_msgpack=as_msgpack,
                    write_timeout_s=config.write_timeout_s,
                )
            async with aclosing(work.answers()) as answers:
                found = sorted([answer async for answer in answers], key=lambda answer: answer.index)
            return await send_whole(
                request,
                model,
                found,
                encoding=encoding,
                as_msgpack=as_msgpack,
                write_timeout_s=config.write_timeout_s,
            )

    async def _begin(self, asked: EncodeRequest, share: Share, arrived_s: float) -> Work:
        share.take(num_items=len(asked.items))
        work = Work(
            self._dispatcher,
            self._fetcher,
            asked.items,
            share,
            arrived_s=arrived_s,
            timeout_s=asked.options.timeout_s or self.config.default_timeout_s,
        )
        await work.prepare(max_answer_bytes=None if asked.options.stream else self.config.max_answer_bytes)
        return work

    async def models(self, request: web.Request) -> web.StreamResponse:
        """`GET /v1/models`."""
        self._caller(request, "encode")
        encoder = self.pool.config.worker.encoder
        model = {
            "id": encoder.model,
            "object": "model",
            "created": 0,
            "owned_by": "encpool",
            "hidden_size": self.pool.client.adapter.hidden_size,
            "dtype": encoder.dtype,
            "max_pixels": encoder.max_pixels,
            "max_bytes": encoder.max_bytes,
        }
        return web.json_response({"object": "list", "data": [model]})

    async def health(self, request: web.Request) -> web.StreamResponse:
        """`GET /health`: this process answers."""
        return web.json_response({"status": "draining" if self._draining else "ok"})

    async def ready(self, request: web.Request) -> web.StreamResponse:
        """`GET /ready`: a worker encoded something a short while ago."""
        self._check_open()
        self._readiness.check()
        return web.json_response({"status": "ready"})

    # --- before and after ----------------------------------------------------------------------------------------

    def _caller(self, request: web.Request, right: str) -> Caller:
        if self._tokens is None:
            return Caller(name=request.remote or "unknown")
        caller = self._tokens.caller(request.headers.get("Authorization"))
        require(caller, right)
        return caller

    def _check_open(self) -> None:
        if self._draining:
            raise PoolClosedError("the gateway is draining; ask another one, or come back later")

    def _model(self, name: str | None) -> str:
        served = self.pool.config.worker.encoder.model
        if name not in (None, served):
            raise UnknownModelError(f"no model {name!r} here; served: {served}")
        return served

    @web.middleware
    async def _answer_errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except Refused as refused:
            return error_response(refused.error, refused.retry_after_s)
        except EncoderPoolError as error:
            return error_response(error)
        except web.HTTPException as error:  # aiohttp's own: no such path, no such method
            body = {"error": {"type": "HTTPError", "message": error.reason, "code": error.status, "param": None}}
            return web.json_response(body, status=error.status, headers={"Allow": error.headers.get("Allow", "")})
        except (ConnectionError, SlowReader) as error:
            logger.info("%s %s: the client is gone: %s", request.method, request.path, error)
            raise
        except Exception as error:  # edge of the process
            logger.exception("%s %s failed", request.method, request.path)
            return error_response(EncodeError(f"the gateway failed: {type(error).__name__}"))
