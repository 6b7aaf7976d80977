"""The items of one request on their way: prepared, sent within a window, awaited until the deadline.

Each item ends exactly once: with its tokens, or with a typed error whatever broke on its way.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch

from cluster.gateway.dispatch import Dispatcher
from cluster.gateway.fetch import Fetcher
from cluster.gateway.limits import Refused, Share
from cluster.gateway.statuses import status_of
from cluster.gateway.wire import Encoded, ItemAnswer, ItemTokens, RequestItem
from cluster.streams.items import Item
from cluster.streams.outcomes import Embedding, Outcome
from encoder.adapters.base import TakesVideo
from encoder.errors import DeadlineError, EncodeError, EncoderPoolError, RequestTooLargeError
from workers.priority import Priority

logger = logging.getLogger(__name__)

WINDOW_BYTES = 64 * 2**20  # tokens of a streamed answer that may be on their way while the reader is slow
MAX_ITEMSIZE = 4  # bytes of a number of float32, the largest that a worker answers with
TEXT_BYTES = 20  # of a number in JSON: -0.5023918151855469 and a comma
MAX_LOOP_BYTES = 256 * 1024  # to look at; see `_is_work`
GRACE_S = 0.2  # a worker that says "too late" itself knows where


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """An item that can be sent."""

    index: int
    item: Item
    num_bytes: int  # of its tokens, predicted


class Work:
    """One request's items. Belongs to the event loop."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        fetcher: Fetcher,
        items: tuple[RequestItem, ...],
        share: Share,
        *,
        arrived_s: float,
        timeout_s: float,
        priority: Priority,
        scope: str = "",
        number_bytes: int = MAX_ITEMSIZE,
    ) -> None:
        """
        Args:
            arrived_s: when the request came, by `time.monotonic`.
            scope: whose embeddings may answer it.
            number_bytes: that a number of a token takes in the answer.
        """
        self._dispatcher = dispatcher
        self._fetcher = fetcher
        self._items = items
        self._share = share
        self._loop = asyncio.get_running_loop()
        self._arrived_s = arrived_s
        self._timeout_s = timeout_s
        self._priority = priority
        self._scope = scope
        self._number_bytes = number_bytes
        self._done: asyncio.Queue[ItemAnswer] = asyncio.Queue()
        self._ready: deque[Ready] = deque()  # in the order that they go
        self._open: dict[int, Item] = {}
        self._num_bytes: dict[int, int] = {}  # of the tokens of an item on its way, predicted
        self._on_their_way = 0  # their sum
        self._sent_away = asyncio.Event()
        self._max_answer_bytes: int | None = None
        self._answer_bytes = 0  # predicted, so far

    async def prepare(self, *, max_answer_bytes: int | None) -> None:
        """Look at the header of every item that is here.

        Args:
            max_answer_bytes: of an answer that goes out as a whole; None for one that is streamed.

        Raises:
            RequestTooLargeError: the answer would be larger.
            Refused: others fill the gateway.
        """
        for index, asked in enumerate(self._items):
            if asked.error is not None:
                self._fail(index, asked.error)
            elif asked.data is not None:
                await self._surely(partial(self._prepare, index, asked.data), [index])
        self._max_answer_bytes = max_answer_bytes
        num_bytes = sum(ready.num_bytes for ready in self._ready)
        self._count(num_bytes)
        self._share.take(num_bytes=num_bytes if max_answer_bytes is not None else min(num_bytes, WINDOW_BYTES))

    async def answers(self) -> AsyncGenerator[ItemAnswer]:
        """What becomes of each item, in the order of their ends. Closing it drops what has not begun."""
        tasks = [asyncio.create_task(self._surely(self._send, [ready.index for ready in self._ready]))]
        tasks += [
            asyncio.create_task(self._surely(partial(self._fetch, index, asked.url), [index]))
            for index, asked in enumerate(self._items)
            if asked.url is not None and asked.error is None
        ]
        left = set(range(len(self._items)))
        try:
            while left:
                try:
                    answer = await self._next()
                except TimeoutError:
                    break
                if answer.index not in left:
                    continue
                left.discard(answer.index)
                self._open.pop(answer.index, None)
                yield answer
                self._on_their_way -= self._num_bytes.pop(answer.index, 0)
                self._sent_away.set()
            late = DeadlineError(f"its deadline of {self._timeout_s:g} s passed")
            for index in sorted(left):
                yield self._error(index, late)
        finally:
            for task in tasks:
                task.cancel()
            if self._open:
                self._dispatcher.cancel(list(self._open.values()))

    async def _next(self) -> ItemAnswer:
        """The next end; what has ended already comes out however late it is. Raises TimeoutError."""
        if not self._done.empty():
            return self._done.get_nowait()
        until_s = self._arrived_s + self._timeout_s + GRACE_S
        async with asyncio.timeout(until_s - time.monotonic()):
            return await self._done.get()

    async def _surely(self, step: Callable[[], Awaitable[None]], indices: Iterable[int]) -> None:
        """Take a step. When it breaks, those of its items that are not on their way end with the error."""
        error: EncoderPoolError
        try:
            await step()
            return
        except Refused as refused:
            error = refused.error
        except EncoderPoolError as failure:
            error = failure
        except Exception as failure:  # strangers' bytes may break what reads them: that is no other item's affair
            logger.exception("an item of a request failed")
            error = EncodeError(f"the gateway failed on it: {type(failure).__name__}")
        for index in indices:
            if index not in self._open:
                self._fail(index, error)

    async def _prepare(self, index: int, data: Encoded) -> None:
        if self._is_work(data):
            self._ready.append(await asyncio.to_thread(self._look, index, data))
        else:
            self._ready.append(self._look(index, data))
            await asyncio.sleep(0)  # others' turn

    def _is_work(self, data: Encoded) -> bool:
        """Whether to look at it takes so long that others wait: a clip, a digest of much, or very much to copy."""
        if len(data) <= MAX_LOOP_BYTES:
            return False
        client = self._dispatcher.client
        is_slow = client.config.caches or isinstance(client.adapter, TakesVideo)
        return is_slow or len(data) > 16 * MAX_LOOP_BYTES

    def _look(self, index: int, data: Encoded) -> Ready:
        """Its header, read. Raises the item's error."""
        client = self._dispatcher.client
        encoded, header, shape = client.read(data)
        now_s = time.monotonic()
        item = Item(
            source=data,
            encoded=encoded,
            shape=shape,
            note=header.note,
            read_s=now_s,
            timeout_s=max(0.0, self._arrived_s + self._timeout_s - now_s),
            priority=self._priority,
            scope=self._scope,
            on_end=partial(self._end, index),
        )
        if client.config.caches and len(data) > MAX_LOOP_BYTES:
            _ = item.digest  # here rather than in the thread that all requests share
        num_bytes = shape.num_tokens * client.adapter.hidden_size * self._number_bytes
        return Ready(index=index, item=item, num_bytes=num_bytes)

    async def _send(self) -> None:
        """Hand over what is ready, as far as the window reaches."""
        while self._ready:
            batch, num_bytes = [], self._on_their_way
            while self._ready and (not num_bytes or num_bytes + self._ready[0].num_bytes <= WINDOW_BYTES):
                batch.append(self._ready.popleft())
                num_bytes += batch[-1].num_bytes
            if batch:
                self._submit(batch)
            else:
                self._sent_away.clear()
                await self._sent_away.wait()

    async def _fetch(self, index: int, url: str) -> None:
        data = await self._fetcher.fetch(url)
        ready = await asyncio.to_thread(self._look, index, data) if self._is_work(data) else self._look(index, data)
        self._count(ready.num_bytes)
        self._share.take(num_bytes=len(data) + ready.num_bytes)
        self._submit([ready])

    def _count(self, num_bytes: int) -> None:
        """So many more bytes of tokens in the answer. Raises RequestTooLargeError."""
        limit, total = self._max_answer_bytes, self._answer_bytes + num_bytes
        if limit is not None and total > limit:
            raise RequestTooLargeError(
                f"the answer would have {total} bytes of tokens, the limit is {limit}; "
                f"send fewer items, ask for a stream, or raise gateway.max_answer_bytes"
            )
        self._answer_bytes = total

    def _submit(self, batch: list[Ready]) -> None:
        """From now on they are on their way. Raises PoolClosedError."""
        self._dispatcher.submit([ready.item for ready in batch])
        for ready in batch:
            self._open[ready.index] = ready.item
            self._num_bytes[ready.index] = ready.num_bytes
            self._on_their_way += ready.num_bytes

    def _end(self, index: int, outcome: Outcome) -> None:
        """In the dispatcher's thread, where nothing may be raised."""
        try:
            if outcome.embedding is None:
                assert outcome.error is not None
                answer = self._error(index, outcome.error)
            else:
                tokens = item_tokens(outcome.embedding)
                answer = ItemAnswer(index=index, status=200, item_id=self._items[index].item_id, tokens=tokens)
        except Exception as error:  # edge of a thread that others share
            logger.exception("an embedding cannot be handed on")
            answer = self._error(index, EncodeError(f"the gateway failed on it: {type(error).__name__}"))
        self._loop.call_soon_threadsafe(self._done.put_nowait, answer)

    def _fail(self, index: int, error: EncoderPoolError) -> None:
        self._done.put_nowait(self._error(index, error))

    def _error(self, index: int, error: EncoderPoolError) -> ItemAnswer:
        return ItemAnswer(
            index=index,
            status=status_of(error),
            item_id=self._items[index].item_id,
            error=type(error).__name__,
            message=str(error),
        )


def item_tokens(embedding: Embedding) -> ItemTokens:
    """An embedding as it travels; its memory is shared."""
    dtype = str(embedding.tokens.dtype).removeprefix("torch.")
    rows, width = embedding.tokens.shape
    return ItemTokens(
        dtype=dtype,
        shape=(rows, width),
        data=embedding.tokens.view(torch.uint8).numpy().reshape(-1).data,
        grids=embedding.shape.grids,
        graphs=embedding.graphs,
        misses=embedding.misses,
        timings_ms=embedding.timings,
        note=embedding.note,
        worker=embedding.worker,
        cached=embedding.cached,
    )
