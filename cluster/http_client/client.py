"""The client for those who do not use asyncio: the other one, on an event loop in a thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable
from contextlib import suppress
from types import TracebackType
from typing import Any, TypeVar

from cluster.gateway.wire import ItemAnswer, ItemTokens
from cluster.http_client.async_client import AsyncHttpClient
from cluster.http_client.sources import Source, SourcesBroken, check_many, in_thread
from encoder.errors import PoolClosedError

Result = TypeVar("Result")

END_TIMEOUT_S = 10.0
POLL_S = 0.005


class HttpClient:
    """Encodes through a gateway. Any thread may call; a `with` block closes it. Closed, it raises PoolClosedError."""

    def __init__(self, url: str, **options: Any) -> None:
        """See `AsyncHttpClient`."""
        self._inner = AsyncHttpClient(url, **options)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=_run, args=[self._loop], name="http-client", daemon=True)
        self._thread.start()
        self._lock = threading.Lock()  # nothing begins behind the end, where nobody would hear of it
        self._end = weakref.finalize(self, _end, self._loop, self._inner)  # of one that nobody closes, too
        self._end.atexit = False

    def __enter__(self) -> HttpClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the connections, and what is under way with them."""
        with self._lock:
            self._end()
        self._thread.join(END_TIMEOUT_S)

    def encode(self, source: Source) -> ItemTokens:
        """See `AsyncHttpClient.encode`."""
        return self._wait(lambda: self._inner.encode(source))

    def encode_many(self, sources: Iterable[Source]) -> Generator[ItemAnswer, None, None]:
        """See `AsyncHttpClient.encode_many`. Sources are taken in a thread of its own."""
        check_many(sources)
        return self._each(self._inner.encode_many(in_thread(sources)))

    def stream(self, sources: Iterable[Source]) -> Generator[ItemAnswer, None, None]:
        """See `AsyncHttpClient.stream`."""
        check_many(sources)
        return self._each(self._inner.stream(list(sources)))

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
        except SourcesBroken as broken:
            raise broken.error from None
        finally:
            with suppress(PoolClosedError):  # then it has ended already
                self._wait(lambda: _closed(answers))

    def _wait(self, begin: Callable[[], Awaitable[Result]]) -> Result:
        with self._lock:
            if not self._end.alive:
                raise PoolClosedError("this client is closed")
            future = asyncio.run_coroutine_threadsafe(_awaiting(begin), self._loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise PoolClosedError("this client was closed meanwhile") from None
        except BaseException:
            future.cancel()
            raise


async def _closed(answers: Any) -> None:  # the hints of AsyncGenerator lack `ag_running`
    """End it. Where Ctrl-C has ended the wait for its next answer, that is still being cancelled."""
    while answers.ag_running:
        await asyncio.sleep(POLL_S)
    await answers.aclose()


async def _awaiting(begin: Callable[[], Awaitable[Result]]) -> Result:
    return await begin()


def _run(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()


def _end(loop: asyncio.AbstractEventLoop, inner: AsyncHttpClient) -> None:
    asyncio.run_coroutine_threadsafe(_shut(inner), loop)


async def _shut(inner: AsyncHttpClient) -> None:
    """Cancel what runs, whoever awaits it, and end the connections and the loop."""
    loop = asyncio.get_running_loop()
    under_way = asyncio.all_tasks() - {asyncio.current_task()}
    for task in under_way:
        task.cancel()
    await asyncio.gather(*under_way, return_exceptions=True)
    await loop.shutdown_asyncgens()
    await inner.close()
    loop.call_soon(loop.stop)
