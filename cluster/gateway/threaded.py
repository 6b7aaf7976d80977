"""A gateway that runs in a thread with an event loop of its own: for a command, an actor, or a test."""

from __future__ import annotations

import asyncio
import threading
from types import TracebackType

from cluster.gateway.app import Gateway
from cluster.gateway.config import GatewayConfig
from cluster.pool import EncoderPool
from encoder.errors import ConfigError


class GatewayThread:
    """Serves from `start` to `stop`. A `with` block does both."""

    def __init__(self, pool: EncoderPool | None, config: GatewayConfig) -> None:
        """The pool stays the caller's. Without one it says 503 until `attach`."""
        self._pool = pool
        self._config = config
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="gateway", daemon=True)
        self.gateway: Gateway | None = None

    @property
    def url(self) -> str:
        """Where it listens, such as "http://127.0.0.1:8080"."""
        assert self.gateway is not None
        host = self._config.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.gateway.port}"

    @property
    def num_requests(self) -> int:
        """Requests under way."""
        return 0 if self.gateway is None else self.gateway.num_requests

    def start(self) -> None:
        """Listen. Raises ConfigError when the address or the tokens file cannot be used."""
        self._thread.start()
        try:
            self.gateway = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        except OSError as error:
            self._end_loop()
            raise ConfigError(
                f"gateway: cannot listen on {self._config.host}:{self._config.port}: {error.strerror or error}"
            ) from error
        except BaseException:
            self._end_loop()
            raise

    async def _start(self) -> Gateway:
        gateway = Gateway(self._config)
        await gateway.start()
        if self._pool is not None:
            gateway.attach(self._pool)
        return gateway

    def attach(self, pool: EncoderPool) -> None:
        """Serve this pool from now on."""

        async def attach() -> None:
            assert self.gateway is not None
            self.gateway.attach(pool)

        asyncio.run_coroutine_threadsafe(attach(), self._loop).result()

    def drain(self) -> bool:
        """Refuse new requests and wait for those under way, `drain_timeout_s` at most; whether all were answered."""
        assert self.gateway is not None
        return asyncio.run_coroutine_threadsafe(self.gateway.drain(), self._loop).result()

    def stop(self) -> None:
        """Hang up on whoever is left and end the thread."""
        if self.gateway is None:
            return
        asyncio.run_coroutine_threadsafe(self.gateway.close(), self._loop).result()
        self._end_loop()
        self.gateway = None

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def __enter__(self) -> GatewayThread:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
