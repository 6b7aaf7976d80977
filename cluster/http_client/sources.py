"""What a client is given to encode, and how it gets at the bytes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterable, Iterable
from pathlib import Path

from cluster.gateway.wire import RequestItem
from encoder.errors import BadMediaError

Source = str | os.PathLike[str] | bytes | bytearray | memoryview
"""A path, a URL with http:// or https://, or the encoded bytes themselves."""


async def load(source: Source) -> RequestItem:
    """The item of a request; its error where the file cannot be read."""
    if isinstance(source, bytes | bytearray | memoryview):
        return RequestItem(data=source)
    if isinstance(source, str) and source.startswith(("http://", "https://")):
        return RequestItem(url=source)
    try:
        return RequestItem(data=await asyncio.to_thread(Path(source).read_bytes))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        return RequestItem(error=BadMediaError(f"{source} cannot be read: {reason}"))


async def each(sources: Iterable[Source] | AsyncIterable[Source]) -> AsyncGenerator[Source]:
    """Sources of either kind of iterable."""
    if isinstance(sources, AsyncIterable):
        async for source in sources:
            yield source
    else:
        for source in sources:
            yield source


async def in_thread(sources: Iterable[Source]) -> AsyncGenerator[Source]:
    """The caller's iterator may block, so it does not run on the event loop."""
    iterator = iter(sources)
    done = object()
    while (source := await asyncio.to_thread(next, iterator, done)) is not done:
        yield source  # type: ignore[misc]
