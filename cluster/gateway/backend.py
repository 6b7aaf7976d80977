"""What a gateway needs of a running pool: the dispatcher, the fetcher of URLs, the probes."""

from __future__ import annotations

from cluster.client import Client
from cluster.gateway.config import GatewayConfig
from cluster.gateway.dispatch import Dispatcher
from cluster.gateway.fetch import Fetcher
from cluster.gateway.limits import Share
from cluster.gateway.readiness import Readiness
from cluster.gateway.wire import RequestItem
from cluster.gateway.work import MAX_ITEMSIZE, Work
from cluster.pool import EncoderPool
from encoder.adapters.base import modalities_of
from encoder.errors import UnknownModelError
from encoder.items import max_item_bytes
from workers.priority import Priority


class Backend:
    """A pool as the gateway uses it: a dispatcher and a probe for each of its models. Belongs to the event loop."""

    def __init__(self, pool: EncoderPool, config: GatewayConfig) -> None:
        """The pool stays the caller's."""
        self.pool = pool
        self._config = config
        self._dispatchers = {name: Dispatcher(pool.client_for(name), config) for name in pool.config.encoders}
        self._readiness = [Readiness(dispatcher, config) for dispatcher in self._dispatchers.values()]
        clients = [dispatcher.client for dispatcher in self._dispatchers.values()]
        max_bytes = max(max_item_bytes(client.adapter, client.config.worker.encoder) for client in clients)
        self._fetcher = Fetcher(config.media_urls, max_bytes=max_bytes)

    def start(self) -> None:
        """Take work."""
        for dispatcher in self._dispatchers.values():
            dispatcher.start()
        for readiness in self._readiness:
            readiness.start()

    async def close(self) -> None:
        """Drop what is left."""
        for readiness in self._readiness:
            readiness.close()
        await self._fetcher.close()
        for dispatcher in self._dispatchers.values():
            dispatcher.close()

    def check_ready(self) -> None:
        """Raises WorkerLostError when a model was not encoded with for too long."""
        for readiness in self._readiness:
            readiness.check()

    @property
    def models(self) -> list[dict[str, object]]:
        """What is served, the default first, as OpenAI's clients list models."""
        return [_about(dispatcher.client) for dispatcher in self._dispatchers.values()]

    def model(self, name: str | None) -> str:
        """The model of a request that asks for this one. Raises UnknownModelError."""
        served = list(self._dispatchers)
        if name is None:
            return served[0]
        if name not in served:
            raise UnknownModelError(f"no model {name!r} here; served: {', '.join(served)}")
        return name

    def width(self, model: str) -> int:
        """Numbers of a token."""
        return self._dispatchers[model].client.adapter.hidden_size

    async def begin(
        self,
        model: str,
        items: tuple[RequestItem, ...],
        share: Share,
        *,
        arrived_s: float,
        timeout_s: float | None,
        priority: str,
        max_answer_bytes: int | None,
        number_bytes: int = MAX_ITEMSIZE,
    ) -> Work:
        """The work of one request, ready to be sent. Raises RequestTooLargeError and Refused."""
        share.take(num_items=len(items))
        work = Work(
            self._dispatchers[model],
            self._fetcher,
            items,
            share,
            arrived_s=arrived_s,
            timeout_s=timeout_s or self._config.default_timeout_s,
            priority=Priority(priority),
            scope=share.caller if self._config.cache_by_token else "",
            number_bytes=number_bytes,
        )
        await work.prepare(max_answer_bytes=max_answer_bytes)
        return work


def _about(client: Client) -> dict[str, object]:
    encoder = client.config.worker.encoder
    return {
        "id": encoder.model,
        "object": "model",
        "created": 0,
        "owned_by": "encpool",
        "hidden_size": client.adapter.hidden_size,
        "dtype": encoder.dtype,
        "modalities": list(modalities_of(client.adapter)),
        "max_pixels": encoder.max_pixels,
        "max_bytes": encoder.max_bytes,
    }
