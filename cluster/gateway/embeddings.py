"""`POST /v1/embeddings`: one vector an image, in the shape that OpenAI's clients send and read.

The vector is the mean of the image's tokens (a pooled encoder has one, which then is it), of length one unless
`normalize` is false. An `input` that is no image fails the whole request, as those clients know no other way.
"""

# Shapes: E width of a vector.

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Literal

import numpy as np
from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cluster.gateway.answers import MAX_LOOP_BYTES, send_json
from cluster.gateway.bodies import read_body, understood
from cluster.gateway.door import Door
from cluster.gateway.json_reader import read_json
from cluster.gateway.requests import check_count, read_item
from cluster.gateway.statuses import status_of
from cluster.gateway.wire import JSON, ItemAnswer, ItemTokens, RequestItem, as_float32
from encoder.errors import ERRORS, ContentTypeError, EncoderPoolError, RequestError


class EmbeddingsRequest(BaseModel):
    """What a request may say."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)

    model: str
    """One of `/v1/models`."""

    input: Any
    """An image (`data:` URI, base64, URL) or a list of them; also as `{"image_url": {"url": ...}}` parts."""

    encoding_format: Literal["float", "base64"] = "float"
    """Numbers, or base64 of little-endian float32."""

    dimensions: int | None = None
    """The width of the model's vectors; they cannot be cut."""

    normalize: bool = True
    """Scale each vector to length one."""

    user: str | None = None
    """Not used."""

    timeout_s: float | None = Field(default=None, gt=0, le=86_400, allow_inf_nan=False)
    """Deadline, from the arrival of the request; left out, the gateway's own."""

    priority: Literal["interactive", "batch"] = "interactive"
    """Interactive items pass batch items that wait, for a while."""


async def embeddings(door: Door, request: web.Request) -> web.StreamResponse:
    """Answer one request."""
    arrived_s = time.monotonic()
    config = door.config
    with door.admit(request) as (backend, share):
        if request.content_type != JSON:
            raise ContentTypeError(f"a body of {request.content_type}; send {JSON}")
        body = await read_body(request, share, max_bytes=config.max_request_bytes, timeout_s=config.read_timeout_s)
        door.counters.body(len(body))
        max_items = config.max_request_items
        asked, items = await understood(body, lambda: _parsed(body, max_items))
        model = backend.model(asked.model)
        width = backend.width(model)
        if asked.dimensions not in (None, width):
            raise RequestError(f"dimensions: {model} gives {width}, which cannot be cut to {asked.dimensions}")
        work = await backend.begin(
            model,
            items,
            share,
            arrived_s=arrived_s,
            timeout_s=asked.timeout_s,
            priority=asked.priority,
            max_answer_bytes=config.max_answer_bytes,
        )
        vectors_E: list[np.ndarray | None] = [None] * len(items)
        num_tokens = 0
        async with aclosing(door.counted(work.answers())) as answers:
            async for answer in answers:
                if answer.tokens is None:
                    raise _failed(answer, len(items))
                num_tokens += answer.tokens.shape[0]
                pool = partial(pooled, answer.tokens, normalize=asked.normalize)
                is_large = len(answer.tokens.data) > MAX_LOOP_BYTES
                vectors_E[answer.index] = await asyncio.to_thread(pool) if is_large else pool()
        return await send_json(
            request,
            _answer(model, vectors_E, num_tokens, as_text=asked.encoding_format == "float"),
            is_large=4 * width * len(items) > MAX_LOOP_BYTES,
            write_timeout_s=config.write_timeout_s,
        )


def pooled(tokens: ItemTokens, *, normalize: bool) -> np.ndarray:
    """One float32 vector `[width]` of an item."""
    vector_E: np.ndarray = as_float32(tokens).mean(axis=0, dtype=np.float32)
    length = float(np.linalg.norm(vector_E))
    return vector_E / length if normalize and length else vector_E


def _answer(model: str, vectors_E: Sequence[np.ndarray | None], num_tokens: int, *, as_text: bool) -> Iterator[bytes]:
    """The answer in JSON, a vector a piece."""
    yield b'{"object": "list", "data": ['
    for index, vector_E in enumerate(vectors_E):
        assert vector_E is not None
        embedding = vector_E.tolist() if as_text else base64.b64encode(vector_E.astype("<f4").tobytes()).decode()
        entry = {"object": "embedding", "index": index, "embedding": embedding}
        yield (b", " if index else b"") + json.dumps(entry).encode()
    end = {"model": model, "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens}}
    yield b"], " + json.dumps(end)[1:].encode()


def _parsed(body: bytearray, max_items: int) -> tuple[EmbeddingsRequest, tuple[RequestItem, ...]]:
    try:
        asked = EmbeddingsRequest.model_validate(read_json(body, max_items=max_items))
    except ValidationError as error:
        detail = error.errors()[0]
        raise RequestError(f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}") from error
    return asked, _items(asked.input, max_items)


def _items(given: object, max_items: int) -> tuple[RequestItem, ...]:
    entries = given if isinstance(given, list) else [given]
    if not entries:
        raise RequestError("input: empty; send an image at least")
    check_count(len(entries), max_items)
    return tuple(read_item(_part(entry)) for entry in entries)


def _part(entry: object) -> object:
    """An image in one of the shapes that other services take, as `read_item` takes it."""
    if not isinstance(entry, str | dict):
        raise RequestError(
            f"input: {type(entry).__name__} is no image; send 'data:image/...;base64,...', base64 or a URL"
        )
    if isinstance(entry, dict):
        url = entry.get("image_url", entry.get("image"))
        if isinstance(url, dict):
            url = url.get("url")
        if url is not None:
            return url
    return entry


def _failed(answer: ItemAnswer, num_items: int) -> EncoderPoolError:
    kind = ERRORS.get(answer.error or "", EncoderPoolError)
    error = kind(f"input[{answer.index}]: {answer.message}" if num_items > 1 else answer.message)
    assert status_of(error) == answer.status
    return error
