"""What a client is given to encode, and how it gets at the bytes."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Iterator
from pathlib import Path

from cluster.gateway.wire import RequestItem
from cluster.streams.sources import read_source
from encoder.errors import ItemError

Source = str | os.PathLike[str] | bytes | bytearray | memoryview
"""A path, a URL with http:// or https://, or the encoded bytes themselves."""


class SourcesBroken(Exception):
    """The caller's iterator raised `error`, perhaps one that would end the event loop if it got there."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


async def load(source: Source) -> RequestItem:
    """The item of a request; its error where there is nothing to send."""
    if isinstance(source, bytes):
        return RequestItem(data=source)
    if isinstance(source, str) and source.startswith(("http://", "https://")):
        return RequestItem(url=source)
    try:
        return RequestItem(data=await asyncio.to_thread(read_source, source, sys.maxsize))
    except ItemError as error:
        return RequestItem(error=error)


def check_many(sources: object) -> None:
    """Raises TypeError for a single path or bytes object, whose pieces are no sources."""
    if isinstance(sources, str | bytes | bytearray | memoryview | Path):
        raise TypeError("this takes many paths, URLs or bytes objects; encode takes a single one")


async def each(sources: Iterable[Source] | AsyncIterable[Source]) -> AsyncGenerator[Source]:
    """Sources of either kind of iterable."""
    if isinstance(sources, AsyncIterable):
        async for source in sources:
            yield source
    else:
        for source in sources:
            yield source


async def in_thread(sources: Iterable[Source]) -> AsyncGenerator[Source]:
    """The caller's iterator may block, so it does not run on the event loop. Raises SourcesBroken."""
    iterator: Iterator[Source] = iter(sources)
    done = object()

    def take() -> Source | SourcesBroken | object:
        try:
            return next(iterator, done)
        except BaseException as error:  # whatever it is, it is the caller's, and goes back to where they wait
            return SourcesBroken(error)

    while (source := await asyncio.to_thread(take)) is not done:
        if isinstance(source, SourcesBroken):
            raise source
        yield source  # type: ignore[misc]
