"""The client for asyncio: requests, and what is asked again."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace
from io import BytesIO
from types import TracebackType
from typing import Any

import aiohttp
import msgpack

from cluster.gateway.item_maps import read_answer_item
from cluster.gateway.requests import write_request
from cluster.gateway.wire import MSGPACK, EncodeOptions, ItemAnswer, ItemTokens, RequestItem
from cluster.http_client.patience import Patience
from cluster.http_client.refusals import PutOff, error_of, refusal, retry_after, unreachable
from cluster.http_client.sources import Source, SourcesBroken, check_many, each, load
from encoder.errors import ConfigError, EncoderPoolError, PoolError, RequestError, RequestTooLargeError
from workers import spans

AGAIN = frozenset({429, 502, 503})
MAX_REQUEST_BYTES = 16 * 2**20
CONNECT_TIMEOUT_S = 10.0
FIRST_PATIENCE_S = 3.0  # when nobody has listened there yet: most likely the address is wrong


class AsyncHttpClient:
    """Encodes through a gateway. Belongs to one event loop; `async with` closes its connections."""

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        options: EncodeOptions | None = None,
        patience_s: float = 60.0,
        max_connections: int = 8,
        items_per_request: int = 8,
        rng: random.Random | None = None,
    ) -> None:
        """
        Args:
            url: of the gateway, such as "http://127.0.0.1:8080".
            options: model, deadline and the like of every item.
            patience_s: how long an item is asked for again before it fails.
            max_connections: requests that `encode_many` has under way.
            items_per_request: items that `encode_many` puts into one; fewer where the gateway, or a proxy before it,
                does not take so many, or so many bytes.

        Raises:
            ConfigError: the URL has no http:// or https://.
        """
        self.url = _checked(url)
        self._headers = {"Content-Type": MSGPACK, "Accept": MSGPACK}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self._options = (options or EncodeOptions()).model_copy(update={"stream": False})
        self._patience_s = patience_s
        self._max_connections = max_connections
        self._items_per_request = items_per_request
        self._rng = rng or random.Random()
        self._session: aiohttp.ClientSession | None = None
        self._was_reached = False

    async def __aenter__(self) -> AsyncHttpClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def encode(self, source: Source) -> ItemTokens:
        """Encode one image. Raises its typed error, or the request's; PoolError when nobody answers."""
        (answer,) = await self._ask([await load(source)])
        if answer.tokens is None:
            raise error_of(answer)
        return answer.tokens

    async def encode_many(self, sources: Iterable[Source] | AsyncIterable[Source]) -> AsyncGenerator[ItemAnswer]:
        """An answer for each source, in their order, with bounded memory; what fails is an answer with an error.

        Raises what concerns every item alike, such as UnauthorizedError; and what the sources raise, once what was
        taken before is answered.
        """
        check_many(sources)
        index = 0
        async with aclosing(self._answered(self._batches(sources))) as answered:
            async for answers in answered:
                for answer in answers:
                    yield replace(answer, index=index)
                    index += 1

    async def stream(self, sources: Iterable[Source]) -> AsyncGenerator[ItemAnswer]:
        """Answers of one request as its items end, in any order, each with its `index`. Nothing is asked again."""
        check_many(sources)
        items = [await load(source) for source in sources]
        for answer in _unreadable(items):
            yield answer
        places = [index for index, item in enumerate(items) if item.error is None]
        if not places:
            return
        options = self._options.model_copy(update={"stream": True})
        body = BytesIO(write_request([items[index] for index in places], options))
        try:
            async with self._client().post(f"{self.url}/v1/encode", data=body, headers=self._heads()) as response:
                if response.content_type != MSGPACK:
                    raise await refusal(response)
                unpacker = msgpack.Unpacker(max_buffer_size=2**32 - 1)
                async for chunk in response.content.iter_any():
                    unpacker.feed(chunk)
                    for entry in unpacker:
                        if entry.get("end"):
                            return
                        answer = read_answer_item(entry)
                        yield replace(answer, index=places[answer.index])
        except (aiohttp.ClientError, OSError) as error:
            raise unreachable(self.url, error) from error
        raise PoolError(f"{self.url} ended its stream before the last item")

    async def models(self) -> list[dict[str, Any]]:
        """What the gateway serves; one that still starts is asked again. Raises as `encode` does."""
        patience = Patience(self._patience_s, self._rng)
        while True:
            try:
                return await self._models()
            except PutOff as error:
                if not await patience.wait(error.retry_after_s):
                    raise error.error from None

    async def _models(self) -> list[dict[str, Any]]:
        try:
            async with self._client().get(f"{self.url}/v1/models", headers=self._heads()) as response:
                self._was_reached = True
                await _check(response, response.status == 200)
                found: list[dict[str, Any]] = (await response.json())["data"]
                return found
        except (aiohttp.ClientError, OSError, ValueError, KeyError, TypeError) as error:
            if isinstance(error, EncoderPoolError):
                raise
            raise unreachable(self.url, error) from error

    # --- one request -----------------------------------------------------------------------------------------------

    async def _ask(self, items: Sequence[RequestItem]) -> list[ItemAnswer]:
        """An answer for each item, in order. What is too much for one request is asked in two."""
        try:
            return await self._ask_together(items)
        except RequestTooLargeError as error:
            if len(items) == 1:  # its neighbours have nothing to do with it
                return [ItemAnswer(index=0, status=413, error=type(error).__name__, message=str(error))]
        half = len(items) // 2
        first, rest = await self._ask(items[:half]), await self._ask(items[half:])
        return [*first, *(replace(answer, index=half + answer.index) for answer in rest)]

    async def _ask_together(self, items: Sequence[RequestItem]) -> list[ItemAnswer]:
        """The answers to one request; items put off are asked for again while patience lasts."""
        answers = {answer.index: answer for answer in _unreadable(items)}
        patience = Patience(self._patience_s, self._rng)
        while left := [index for index in range(len(items)) if index not in answers]:
            failure: EncoderPoolError | None = None
            told_s: float | None = None
            put_off: dict[int, ItemAnswer] = {}
            try:
                found, told_s = await self._post([items[index] for index in left])
                for index, answer in zip(left, found, strict=True):
                    (put_off if answer.status in AGAIN else answers)[index] = answer
            except PutOff as error:
                failure, told_s = error.error, error.retry_after_s
            except (aiohttp.ClientError, OSError) as error:
                failure = unreachable(self.url, error)
                if isinstance(error, aiohttp.ClientConnectorError) and not self._was_reached:
                    patience.shorten(FIRST_PATIENCE_S)
            if failure is None and not put_off:
                break
            if not await patience.wait(told_s):
                if failure is not None:
                    raise failure
                answers |= put_off
                break
        return [replace(answers[index], index=index) for index in range(len(items))]

    async def _post(self, items: Sequence[RequestItem]) -> tuple[list[ItemAnswer], float | None]:
        body = BytesIO(write_request(items, self._options))  # which aiohttp sends in pieces
        async with self._client().post(f"{self.url}/v1/encode", data=body, headers=self._heads()) as response:
            self._was_reached = True
            await _check(response, response.content_type == MSGPACK)
            entries = msgpack.unpackb(await response.read())["items"]
            found = sorted(map(read_answer_item, entries), key=lambda answer: answer.index)
            if len(found) != len(items):
                raise RequestError(f"{len(items)} items were asked for, {len(found)} came back")
            return found, retry_after(response)

    # --- many requests ---------------------------------------------------------------------------------------------

    async def _batches(self, sources: Iterable[Source] | AsyncIterable[Source]) -> AsyncGenerator[list[RequestItem]]:
        """Items for a request each. Raises SourcesBroken, behind what came before."""
        batch: list[RequestItem] = []
        num_bytes = 0
        broken: Exception | None = None
        try:
            async for source in each(sources):
                item = await load(source)
                size = len(item.data or b"")
                if batch and (len(batch) >= self._items_per_request or num_bytes + size > MAX_REQUEST_BYTES):
                    yield batch
                    batch, num_bytes = [], 0
                batch.append(item)
                num_bytes += size
        except Exception as error:  # the caller's own
            broken = error
        if batch:
            yield batch
        if broken is not None:
            raise SourcesBroken(broken)

    async def _answered(self, batches: AsyncGenerator[list[RequestItem]]) -> AsyncGenerator[list[ItemAnswer]]:
        """The answers to each batch, in order, so many requests at once. Raises what broke the sources at the end."""
        tasks: deque[asyncio.Task[list[ItemAnswer]]] = deque()
        broken: BaseException | None = None
        try:
            try:
                async for batch in batches:
                    if len(tasks) >= self._max_connections:
                        yield await tasks.popleft()
                    tasks.append(asyncio.create_task(self._ask(batch)))
            except SourcesBroken as end:
                broken = end.error
            while tasks:
                yield await tasks.popleft()
            if broken is not None:
                raise broken
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _heads(self) -> dict[str, str]:
        """Of a request: it belongs to whatever span the caller is in."""
        trace = spans.current()
        return {**self._headers, "traceparent": trace} if trace else self._headers

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None, connect=CONNECT_TIMEOUT_S),
                read_bufsize=2**20,
            )
        return self._session


async def _check(response: aiohttp.ClientResponse, is_answer: bool) -> None:
    """Raise why there is no answer: PutOff where it may be asked again."""
    if is_answer:
        return
    why = await refusal(response)
    if response.status in AGAIN:
        raise PutOff(why, retry_after(response))
    raise why


def _unreadable(items: Sequence[RequestItem]) -> list[ItemAnswer]:
    """Answers to the items that there is nothing of to send."""
    return [
        ItemAnswer(index=index, status=422, error="BadMediaError", message=str(item.error))
        for index, item in enumerate(items)
        if item.error is not None
    ]


def _checked(url: str) -> str:
    if not url.lower().startswith(("http://", "https://")):
        raise ConfigError(f"{url!r} is no URL of a gateway; write http://{url.rpartition('://')[2]}")
    return url.rstrip("/")
