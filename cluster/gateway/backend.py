"""What a gateway needs of a running pool: the dispatcher, the fetcher of URLs, the probes."""

from __future__ import annotations

from cluster.gateway.config import GatewayConfig
from cluster.gateway.dispatch import Dispatcher
from cluster.gateway.fetch import Fetcher
from cluster.gateway.limits import Share
from cluster.gateway.readiness import Readiness
from cluster.gateway.work import Work
from cluster.pool import EncoderPool
from cluster.wire import RequestItem
from encoder.adapters.registry import resolve_model
from encoder.errors import UnknownModelError
from encoder.items import max_item_bytes
from workers.priority import Priority


class Backend:
    """A pool as the gateway uses it. Belongs to the event loop, but for the dispatcher."""

    def __init__(self, pool: EncoderPool, config: GatewayConfig) -> None:
        """The pool stays the caller's."""
        self.pool = pool
        self._config = config
        self.dispatcher = Dispatcher(pool.client, config)
        max_bytes = max_item_bytes(pool.client.adapter, pool.config.worker.encoder)
        self._fetcher = Fetcher(config.media_urls, max_bytes=max_bytes)
        self.readiness = Readiness(self.dispatcher, config)

    def start(self) -> None:
        """Take work."""
        self.dispatcher.start()
        self.readiness.start()

    async def close(self) -> None:
        """Drop what is left."""
        self.readiness.close()
        await self._fetcher.close()
        self.dispatcher.close()

    @property
    def models(self) -> list[dict[str, object]]:
        """What is served, the default first, as OpenAI's clients list models."""
        encoder = self.pool.config.worker.encoder
        return [
            {
                "id": encoder.model,
                "object": "model",
                "created": 0,
                "owned_by": "encpool",
                "hidden_size": self.pool.client.adapter.hidden_size,
                "dtype": encoder.dtype,
                "modalities": list(resolve_model(encoder.model).family.modalities),
                "max_pixels": encoder.max_pixels,
                "max_bytes": encoder.max_bytes,
            }
        ]

    def model(self, name: str | None) -> str:
        """The model of a request that asks for this one. Raises UnknownModelError."""
        served = [str(model["id"]) for model in self.models]
        if name is None:
            return served[0]
        if name not in served:
            raise UnknownModelError(f"no model {name!r} here; served: {', '.join(served)}")
        return name

    async def begin(
        self,
        items: tuple[RequestItem, ...],
        share: Share,
        *,
        arrived_s: float,
        timeout_s: float | None,
        priority: str,
        max_answer_bytes: int | None,
    ) -> Work:
        """The work of one request, ready to be sent. Raises RequestTooLargeError and Refused."""
        share.take(num_items=len(items))
        work = Work(
            self.dispatcher,
            self._fetcher,
            items,
            share,
            arrived_s=arrived_s,
            timeout_s=timeout_s or self._config.default_timeout_s,
            priority=Priority(priority),
            scope=share.caller if self._config.cache_by_token else "",
        )
        await work.prepare(max_answer_bytes=max_answer_bytes)
        return work
