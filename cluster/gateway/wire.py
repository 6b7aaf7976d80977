"""What travels over HTTP: requests and answers of `/v1/encode`, in msgpack and in JSON. Never pickle.

A request is a map: `items`, and perhaps what `EncodeOptions` names. An item is the encoded image itself (binary in
msgpack, base64 or a `data:` URI in JSON), a URL, or a map with `data` or `url` and perhaps an `id`. An answer is a map
with `items`, each a map of its own: see `item_map`. A streamed answer is one such map after the other, as items finish,
each with its `index`, and a last map `{"end": true, ...}`: msgpack objects end to end, or a line of JSON each.

Tokens are rows in C order, little-endian; bfloat16 as the 2-byte words it is made of. Free of torch and aiohttp.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import msgpack
import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cluster.gateway.json_reader import read_json
from cluster.gateway.msgpack_reader import ReadLimits, read_msgpack
from encoder.errors import BadMediaError, EncoderPoolError, RequestError, RequestTooLargeError, kind_of
from encoder.types import Grid

if TYPE_CHECKING:
    import torch

VERSION = 1
MSGPACK, JSON, JSON_LINES = "application/msgpack", "application/json", "application/x-ndjson"
ITEM_DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),
}
MAX_ID = 256

Encoded = bytes | bytearray | memoryview


class EncodeOptions(BaseModel):
    """What a request asks for beside its items."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)

    v: Literal[1] = 1
    """Version of this format."""

    model: str | None = None
    """A model that the pool serves; left out, its only one or its first."""

    timeout_s: float | None = Field(default=None, gt=0, le=86_400, allow_inf_nan=False)
    """Deadline of every item, from the arrival of the request; left out, the gateway's own."""

    priority: Literal["interactive", "batch"] = "interactive"
    """Interactive items pass batch items that wait, for a while."""

    stream: bool = False
    """Answer item by item, as they finish."""

    encoding: Literal["base64", "float"] = "base64"
    """Tokens in JSON: base64 of their bytes, or lists of numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestItem:
    """One item as it was asked for: `data`, or a `url` to fetch it from, or the error that it is."""

    data: Encoded | None = None
    url: str | None = None
    item_id: str | None = None
    error: EncoderPoolError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeRequest:
    """A request, understood."""

    items: tuple[RequestItem, ...]
    options: EncodeOptions = field(default_factory=EncodeOptions)


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemTokens:
    """What the encoder made of one item."""

    dtype: str  # a key of ITEM_DTYPES
    shape: tuple[int, int]  # tokens, width
    data: Encoded  # its rows
    grids: tuple[Grid, ...]
    graphs: tuple[str, ...] = ()
    misses: tuple[str, ...] = ()
    timings_ms: Mapping[str, float] = field(default_factory=dict)
    note: str | None = None
    worker: str = ""
    cached: bool = False

    def numpy(self) -> np.ndarray:
        """Tokens `[rows, width]`; bfloat16, which numpy lacks, as float32."""
        return as_float32(self) if self.dtype == "bfloat16" else words(self)

    def torch(self) -> torch.Tensor:
        """Tokens `[rows, width]` in their own dtype. Needs torch."""
        import torch

        tokens = torch.from_numpy(words(self).copy())
        return tokens.view(torch.bfloat16) if self.dtype == "bfloat16" else tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemAnswer:
    """What became of one item: `tokens`, or an `error` by its name in `encoder.errors.ERRORS`, and its HTTP status."""

    index: int
    status: int
    item_id: str | None = None
    tokens: ItemTokens | None = None
    error: str | None = None
    message: str = ""


# --- requests ---


def read_request(body: Encoded, content_type: str, *, max_items: int) -> EncodeRequest:
    """A body of MSGPACK or JSON. Raises RequestError, RequestTooLargeError for too many items."""
    if content_type == MSGPACK:
        value = read_msgpack(body, ReadLimits(max_values=64 + 8 * max_items))
    else:
        value = read_json(body, max_items=max_items)
    if not isinstance(value, dict):
        raise RequestError(f"a request is a map with 'items', got {kind_of(value)}")
    items = value.pop("items", None)
    if not isinstance(items, list) or not items:
        raise RequestError("'items' is a list of images, one at least")
    check_count(len(items), max_items)
    return EncodeRequest(items=tuple(map(read_item, items)), options=read_options(value))


def check_count(num_items: int, max_items: int) -> None:
    """Raises RequestTooLargeError."""
    if num_items > max_items:
        raise RequestTooLargeError(
            f"the request has {num_items} items, the limit is {max_items}; send several requests"
        )


def read_options(values: Mapping[str, object]) -> EncodeOptions:
    """The options of a request. Raises RequestError that names the key."""
    try:
        return EncodeOptions.model_validate(values)
    except ValidationError as error:
        detail = error.errors()[0]
        where, given = ".".join(map(str, detail["loc"])), repr(detail["input"])[:80]
        if detail["type"] == "extra_forbidden":
            known = ", ".join(["items", *EncodeOptions.model_fields])
            raise RequestError(f"unknown key {where!r}, known here: {known}") from error
        raise RequestError(f"{where}: {detail['msg'][:1].lower()}{detail['msg'][1:]}, got {given}") from error


def read_item(value: object) -> RequestItem:
    """One element of `items`. Raises RequestError for what is no item; a picture that is no base64 is its own error."""
    item_id = None
    if isinstance(value, dict):
        unknown = value.keys() - {"data", "url", "id"}
        if unknown or ("data" in value) == ("url" in value):
            raise RequestError(f"an item is a map with 'data' or 'url' and perhaps 'id', got {sorted(value)[:8]}")
        item_id = value.get("id")
        if item_id is not None and not (isinstance(item_id, str) and len(item_id) <= MAX_ID):
            raise RequestError(f"an item's 'id' is text of at most {MAX_ID} letters")
        if "url" in value:
            if not isinstance(value["url"], str):
                raise RequestError(f"an item's 'url' is text, got {kind_of(value['url'])}")
            return replace_id(_from_text(value["url"], bare_base64=False), item_id)
        value = value["data"]
    if isinstance(value, bytes | bytearray | memoryview):
        return RequestItem(data=value, item_id=item_id)
    if isinstance(value, str):
        return replace_id(_from_text(value, bare_base64=True), item_id)
    raise RequestError(f"an item is an encoded image, a URL or a map, got {kind_of(value)}")


def replace_id(item: RequestItem, item_id: str | None) -> RequestItem:
    """The same item by this name."""
    return RequestItem(data=item.data, url=item.url, item_id=item_id, error=item.error)


def _from_text(text: str, *, bare_base64: bool) -> RequestItem:
    if text[:8].lower().startswith(("http://", "https://")):
        return RequestItem(url=text)
    if text[:5].lower() == "data:":
        head, comma, text = text.partition(",")
        if not comma or not head.lower().endswith(";base64"):
            return RequestItem(
                error=BadMediaError(f"a data: URI of an image is 'data:image/...;base64,...', got {head[:60]!r}")
            )
    elif not bare_base64:
        return RequestItem(error=BadMediaError(f"a URL begins with http://, https:// or data:, got {text[:60]!r}"))
    try:
        return RequestItem(data=base64.b64decode(text, validate=True))
    except (binascii.Error, ValueError) as error:
        return RequestItem(error=BadMediaError(f"the image is not base64: {error}"))


def write_request(items: Sequence[RequestItem], options: EncodeOptions) -> bytes:
    """A request in msgpack."""
    entries: list[object] = []
    for item in items:
        source: dict[str, object] = {"data": item.data} if item.url is None else {"url": item.url}
        if item.item_id is not None:
            source["id"] = item.item_id
        entries.append(item.data if source.keys() == {"data"} else source)
    body: bytes = msgpack.packb({**options.model_dump(exclude_none=True, exclude={"encoding"}), "items": entries})
    return body


# --- answers ---


def item_map(answer: ItemAnswer) -> dict[str, Any]:
    """An item of an answer, all but its tokens' `data`."""
    entry: dict[str, Any] = {"index": answer.index, "status": answer.status}
    if answer.item_id is not None:
        entry["id"] = answer.item_id
    if answer.tokens is None:
        return {**entry, "error": {"type": answer.error, "message": answer.message}}
    tokens = answer.tokens
    entry |= {
        "dtype": tokens.dtype,
        "shape": list(tokens.shape),
        "grids": [list(grid) for grid in tokens.grids],
        "graphs": list(tokens.graphs),
        "misses": list(tokens.misses),
        "timings_ms": {name: round(ms, 3) for name, ms in tokens.timings_ms.items()},
        "worker": tokens.worker,
        "cached": tokens.cached,
    }
    if tokens.note is not None:
        entry["note"] = tokens.note
    return entry


def msgpack_item(answer: ItemAnswer) -> list[Encoded]:
    """An item in msgpack, in pieces: the tokens are not copied."""
    entry = item_map(answer)
    if answer.tokens is None:
        return [msgpack.packb(entry)]
    packer = msgpack.Packer(autoreset=False)
    packer.pack_map_header(len(entry) + 1)
    for name, value in entry.items():
        packer.pack(name)
        packer.pack(value)
    packer.pack("data")
    data = memoryview(answer.tokens.data).cast("B")
    return [packer.bytes() + b"\xc6" + len(data).to_bytes(4), data]  # the header of a binary of up to 4 GiB


def msgpack_answer(model: str, answers: Sequence[ItemAnswer]) -> list[Encoded]:
    """A whole answer in msgpack, in pieces."""
    packer = msgpack.Packer(autoreset=False)
    packer.pack_map_header(3)
    for value in ("v", VERSION, "model", model, "items"):
        packer.pack(value)
    packer.pack_array_header(len(answers))
    return [packer.bytes(), *(piece for answer in answers for piece in msgpack_item(answer))]


def json_item(answer: ItemAnswer, encoding: str) -> dict[str, Any]:
    """An item in JSON; its `data` is base64, or lists of numbers."""
    entry = item_map(answer)
    if answer.tokens is not None:
        tokens = answer.tokens
        entry["data"] = base64.b64encode(tokens.data).decode() if encoding == "base64" else as_float32(tokens).tolist()
    return entry


def end_map(num_items: int, num_failed: int) -> dict[str, Any]:
    """The last map of a streamed answer."""
    return {"end": True, "num_items": num_items, "num_failed": num_failed}


def read_answer_item(entry: Mapping[str, Any]) -> ItemAnswer:
    """An item of a msgpack answer, at the client. Raises RequestError when it is none."""
    try:
        if "error" in entry:
            return ItemAnswer(
                index=entry["index"],
                status=entry["status"],
                item_id=entry.get("id"),
                error=entry["error"]["type"],
                message=entry["error"]["message"],
            )
        rows, width = entry["shape"]
        tokens = ItemTokens(
            dtype=entry["dtype"],
            shape=(rows, width),
            data=entry["data"],
            grids=tuple((frames, high, wide) for frames, high, wide in entry["grids"]),
            graphs=tuple(entry["graphs"]),
            misses=tuple(entry["misses"]),
            timings_ms=entry["timings_ms"],
            note=entry.get("note"),
            worker=entry["worker"],
            cached=entry["cached"],
        )
        if rows * width * ITEM_DTYPES[tokens.dtype].itemsize != len(tokens.data):
            raise ValueError(f"{len(tokens.data)} bytes are no {rows} x {width} {tokens.dtype}")
    except (KeyError, TypeError, ValueError) as error:
        raise RequestError(f"this is no item of an answer: {type(error).__name__}: {error}") from error
    return ItemAnswer(index=entry["index"], status=entry["status"], item_id=entry.get("id"), tokens=tokens)


def words(tokens: ItemTokens) -> np.ndarray:
    """Tokens `[rows, width]` in their own dtype; bfloat16 as uint16 words. A view of the data."""
    return np.frombuffer(tokens.data, dtype=ITEM_DTYPES[tokens.dtype]).reshape(tokens.shape)


def as_float32(tokens: ItemTokens) -> np.ndarray:
    """Tokens `[rows, width]` as float32."""
    found = words(tokens)
    if tokens.dtype == "bfloat16":
        return (found.astype(np.uint32) << 16).view(np.float32)
    return found.astype(np.float32, copy=False)


def join(pieces: Iterable[Encoded]) -> bytes:
    """Pieces as one body."""
    return b"".join(pieces)
