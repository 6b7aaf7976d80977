"""The client for those who do not use asyncio: the other one, on an event loop in a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable
from concurrent.futures import CancelledError
from contextlib import suppress
from types import TracebackType
from typing import Any, TypeVar

from cluster.gateway.wire import ItemAnswer, ItemTokens
from cluster.http_client.async_client import AsyncHttpClient
from cluster.http_client.sources import Source, in_thread
from encoder.errors import PoolClosedError

Result = TypeVar("Result")


class HttpClient:
    """Encodes through a gateway. Any thread may call; a `with` block closes it."""

    def __init__(self, url: str, **options: Any) -> None:
        """See `AsyncHttpClient`."""
        self._inner = AsyncHttpClient(url, **options)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="http-client", daemon=True)
        self._thread.start()

    def __enter__(self) -> HttpClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the connections, and what is under way in other threads or left half read."""
        if self._thread.is_alive():
            self._wait(self._end)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10)
            self._loop.close()

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._loop.shutdown_asyncgens()
        await self._inner.close()

    def encode(self, source: Source) -> ItemTokens:
        """See `AsyncHttpClient.encode`."""
        return self._wait(lambda: self._inner.encode(source))

    def encode_many(self, sources: Iterable[Source]) -> Generator[ItemAnswer, None, None]:
        """See `AsyncHttpClient.encode_many`. Sources are taken in a thread of its own."""
        return self._each(self._inner.encode_many(in_thread(sources)))

    def stream(self, sources: Iterable[Source]) -> Generator[ItemAnswer, None, None]:
        """See `AsyncHttpClient.stream`."""
        return self._each(self._inner.stream(sources))

    def models(self) -> list[dict[str, Any]]:
        """See `AsyncHttpClient.models`."""
        return self._wait(self._inner.models)

    def _each(self, answers: AsyncGenerator[ItemAnswer]) -> Generator[ItemAnswer, None, None]:
        try:
            while True:
                answer = self._wait(lambda: anext(answers, None))
                if answer is None:
                    return
                yield answer
        finally:
            with suppress(PoolClosedError):  # which has ended them
                self._wait(answers.aclose)

    def _wait(self, start: Callable[[], Awaitable[Result]]) -> Result:
        """What it comes to, begun on the event loop."""
        if self._loop.is_closed():
            raise PoolClosedError("this client is closed")
        future = asyncio.run_coroutine_threadsafe(_awaited(start), self._loop)
        try:
            return future.result()
        except CancelledError:
            raise PoolClosedError("this client was closed meanwhile") from None
        except BaseException:
            future.cancel()
            raise


async def _awaited(start: Callable[[], Awaitable[Result]]) -> Result:
    return await start()
