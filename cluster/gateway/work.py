"""The items of one request on their way: prepared, sent within a window, awaited until the deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from functools import partial

import torch

from cluster.client import Embedding, Outcome
from cluster.gateway.dispatch import Dispatcher
from cluster.gateway.fetch import Fetcher
from cluster.gateway.limits import Refused, Share
from cluster.gateway.statuses import status_of
from cluster.gateway.wire import Encoded, ItemAnswer, ItemTokens, RequestItem
from cluster.streams.items import Item
from encoder.errors import DeadlineError, EncoderPoolError, RequestTooLargeError
from workers.priority import Priority

WINDOW_BYTES = 64 * 2**20  # tokens of a streamed answer that may be on their way while the reader is slow
MAX_ITEMSIZE = 4  # bytes of a number of float32, the largest that a worker answers with
TEXT_BYTES = 20  # of a number in JSON: -0.5023918151855469 and a comma
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
        self._ready: list[Ready] = []
        self._open: dict[int, Item] = {}
        self._num_bytes: dict[int, int] = {}  # of the tokens of an item on its way, predicted
        self._on_their_way = 0  # their sum
        self._sent_away = asyncio.Event()

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
                ready = self._look(index, asked.data)
                if ready is not None:
                    self._ready.append(ready)
                await asyncio.sleep(0)  # others' turn
        num_bytes = sum(ready.num_bytes for ready in self._ready)
        if max_answer_bytes is None:
            num_bytes = min(num_bytes, WINDOW_BYTES)
        elif num_bytes > max_answer_bytes:
            raise RequestTooLargeError(
                f"the answer would have {num_bytes} bytes of tokens, the limit is {max_answer_bytes}; "
                f"send fewer items, or ask for a stream"
            )
        self._share.take(num_bytes=num_bytes)

    async def answers(self) -> AsyncGenerator[ItemAnswer]:
        """What becomes of each item, in the order of their ends. Closing it drops what has not begun."""
        tasks = [asyncio.create_task(self._send())]
        tasks += [
            asyncio.create_task(self._fetch(index, asked.url))
            for index, asked in enumerate(self._items)
            if asked.url is not None and asked.error is None
        ]
        left = set(range(len(self._items)))
        try:
            while left:
                until_s = self._arrived_s + self._timeout_s + GRACE_S
                try:
                    answer = await asyncio.wait_for(self._done.get(), until_s - time.monotonic())
                except TimeoutError:
                    break
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

    def _look(self, index: int, data: Encoded) -> Ready | None:
        client = self._dispatcher.client
        try:
            encoded, header, shape = client.read(data)
        except EncoderPoolError as error:
            self._fail(index, error)
            return None
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
        num_bytes = shape.num_tokens * client.adapter.hidden_size * self._number_bytes
        return Ready(index=index, item=item, num_bytes=num_bytes)

    async def _send(self) -> None:
        """Hand over what is ready, as far as the window reaches."""
        batch: list[Item] = []
        for ready in self._ready:
            while self._on_their_way and self._on_their_way + ready.num_bytes > WINDOW_BYTES:
                if batch:
                    self._submit(batch)
                    batch = []
                self._sent_away.clear()
                await self._sent_away.wait()
            self._note(ready)
            batch.append(ready.item)
        self._submit(batch)
        self._ready.clear()

    async def _fetch(self, index: int, url: str) -> None:
        try:
            data = await self._fetcher.fetch(url)
            ready = self._look(index, data)
            if ready is None:
                return
            self._share.take(num_bytes=len(data) + ready.num_bytes)
        except Refused as refused:
            self._fail(index, refused.error)
        except EncoderPoolError as error:
            self._fail(index, error)
        else:
            self._note(ready)
            self._submit([ready.item])

    def _note(self, ready: Ready) -> None:
        """It is on its way."""
        self._open[ready.index] = ready.item
        self._num_bytes[ready.index] = ready.num_bytes
        self._on_their_way += ready.num_bytes

    def _submit(self, items: list[Item]) -> None:
        try:
            self._dispatcher.submit(items)
        except EncoderPoolError as error:
            for index, item in list(self._open.items()):
                if item in items:
                    self._fail(index, error)

    def _end(self, index: int, outcome: Outcome) -> None:
        """In the dispatcher's thread."""
        if outcome.embedding is None:
            assert outcome.error is not None
            answer = self._error(index, outcome.error)
        else:
            tokens = item_tokens(outcome.embedding)
            answer = ItemAnswer(index=index, status=200, item_id=self._items[index].item_id, tokens=tokens)
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
