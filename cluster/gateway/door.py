"""`Door`: what every route asks. Who comes in, how much of the room is left for it, and the pool behind."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager

from aiohttp import web

from cluster.gateway.auth import Caller, TokenBook, read_tokens, require
from cluster.gateway.backend import Backend
from cluster.gateway.config import GatewayConfig
from cluster.gateway.counters import Counters
from cluster.gateway.limits import CallerLimits, Room, Share
from cluster.gateway.recent import Recent
from cluster.gateway.wire import ItemAnswer
from cluster.pool import EncoderPool
from encoder.errors import PoolClosedError


class Door:
    """One gateway's. Belongs to its event loop."""

    def __init__(self, config: GatewayConfig) -> None:
        """Reads the tokens file. Raises ConfigError when there is something wrong with it."""
        self.config = config
        self.recent = Recent()
        self.room = Room(config)
        self.counters = Counters(self.room)
        self.is_draining = False
        self._tokens: TokenBook | None = None if config.tokens_file is None else read_tokens(config.tokens_file)
        self._limits = CallerLimits(config)
        self._backend: Backend | None = None

    @property
    def pool(self) -> EncoderPool | None:
        """The pool that is served, once there is one."""
        return None if self._backend is None else self._backend.pool

    @property
    def state(self) -> str:
        """Where the gateway stands in its life."""
        return "draining" if self.is_draining else "starting" if self._backend is None else "ok"

    def attach(self, pool: EncoderPool) -> None:
        """Serve this pool from now on. It stays the caller's."""
        self._backend = Backend(pool, self.config)
        self._backend.start()

    async def close(self) -> None:
        """Drop what is left."""
        if self._backend is not None:
            await self._backend.close()

    def backend(self) -> Backend:
        """The pool. Raises PoolClosedError while there is none, or none any more."""
        if self.is_draining:
            raise PoolClosedError("the gateway is draining; ask another one, or come back later")
        if self._backend is None:
            raise PoolClosedError("the pool is starting; come back later")
        return self._backend

    def caller(self, request: web.Request, right: str) -> Caller:
        """Who asks. Raises UnauthorizedError and ForbiddenError."""
        if self._tokens is None:
            return Caller(name=request.remote or "unknown")
        caller = self._tokens.caller(request.headers.get("Authorization"))
        require(caller, right)
        return caller

    @contextmanager
    def admit(self, request: web.Request) -> Iterator[tuple[Backend, Share]]:
        """A request that wants something encoded, before its body is read: the pool, and its share of the room.

        Raises UnauthorizedError, ForbiddenError, PoolClosedError and Refused.
        """
        caller = self.caller(request, "encode")
        backend = self.backend()
        started_s = time.monotonic()
        with self._limits.request(caller.name), self.room.request() as share:
            share.caller = caller.name
            yield backend, share
            self.recent.answer(time.monotonic() - started_s, share.num_items)

    async def counted(self, answers: AsyncGenerator[ItemAnswer]) -> AsyncGenerator[ItemAnswer]:
        """The same answers, counted, and their errors remembered for those who watch."""
        async with aclosing(answers):
            async for answer in answers:
                self.counters.item(answer.status, 0 if answer.tokens is None else len(answer.tokens.data))
                if answer.tokens is None:
                    self.recent.note(answer.status, answer.error or "", answer.message)
                yield answer
