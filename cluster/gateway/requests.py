"""A request of `/v1/encode` out of its body, and, at the client, into one. What strangers send is read strictly."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgpack
from pydantic import ValidationError

from cluster.gateway.json_reader import read_json
from cluster.gateway.msgpack_reader import ReadLimits, read_msgpack
from cluster.gateway.wire import MSGPACK, Encoded, EncodeOptions, EncodeRequest, RequestItem
from encoder.errors import BadMediaError, RequestError, RequestTooLargeError, kind_of

MAX_ID = 256


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
            f"the request has {num_items} items, the limit is {max_items}; send several requests, or "
            f"raise gateway.max_request_items"
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
            return replace(_from_text(value["url"], bare_base64=False), item_id=item_id)
        value = value["data"]
    if isinstance(value, bytes | bytearray | memoryview):
        return RequestItem(data=value, item_id=item_id)
    if isinstance(value, str):
        return replace(_from_text(value, bare_base64=True), item_id=item_id)
    raise RequestError(f"an item is an encoded image, a URL or a map, got {kind_of(value)}")


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
