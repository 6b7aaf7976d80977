"""Whether a worker encoded something lately: what traffic shows, and without traffic a small picture now and then."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from io import BytesIO

from cluster.gateway.config import GatewayConfig
from cluster.gateway.dispatch import Dispatcher
from cluster.streams.items import Item
from cluster.streams.outcomes import Outcome
from encoder.errors import EncoderPoolError, WorkerLostError
from encoder.pictures import draw_picture

logger = logging.getLogger(__name__)


class Readiness:
    """Knows the last success. Belongs to the event loop, but for the ends of probes."""

    def __init__(
        self, dispatcher: Dispatcher, config: GatewayConfig, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._dispatcher = dispatcher
        self._interval_s = config.probe_interval_s
        self._now_s = now_s
        self._error = "no probe has come back yet"
        self._task: asyncio.Task[None] | None = None
        picture = BytesIO()
        draw_picture(64, 48, 0).save(picture, "PNG")
        self._picture = picture.getvalue()

    def start(self) -> None:
        """Probe from now on."""
        self._task = asyncio.create_task(self._probe_for_ever())

    def close(self) -> None:
        """Probe no more."""
        if self._task is not None:
            self._task.cancel()

    def check(self) -> None:
        """Raises WorkerLostError when the last success is too long ago."""
        age_s = self._age_s()
        if age_s == math.inf:
            raise WorkerLostError(f"not ready: {self._error}")
        if age_s > 3 * self._interval_s:
            raise WorkerLostError(f"not ready: the last success is {age_s:.1f} s ago; {self._error}")

    async def _probe_for_ever(self) -> None:
        while True:
            if self._age_s() >= self._interval_s:
                self._probe()
            await asyncio.sleep(self._interval_s)

    def _age_s(self) -> float:
        success_s = self._dispatcher.success_s
        return math.inf if success_s is None else self._now_s() - success_s

    def _probe(self) -> None:
        try:
            encoded, header, shape = self._dispatcher.client.read(self._picture)
            item = Item(
                source=self._picture,
                encoded=encoded,
                shape=shape,
                note=header.note,
                read_s=time.monotonic(),
                timeout_s=2 * self._interval_s,
                scope=None,  # an answer from a cache would say nothing of the encoder
                on_end=self._end,
            )
            self._dispatcher.submit([item])
        except EncoderPoolError as error:
            self._error = str(error)

    def _end(self, outcome: Outcome) -> None:
        if outcome.error is not None:
            self._error = str(outcome.error)
            logger.warning("a probe failed: %s", outcome.error)
