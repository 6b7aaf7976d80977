"""What travels over HTTP: requests and answers of `/v1/encode`, in msgpack and in JSON. Never pickle.

A request is a map: `items`, and perhaps what `EncodeOptions` names. An item is the encoded image itself (binary in
msgpack, base64 or a `data:` URI in JSON), a URL, or a map with `data` or `url` and perhaps an `id`. An answer is a map
with `items`, each a map of its own: see `item_map` (item_maps.py). A streamed answer is one such map after the other,
as items finish, each with its `index`, and a last map `{"end": true, ...}`: msgpack objects end to end, or a line of
JSON each.

Tokens are rows in C order, little-endian; bfloat16 as the 2-byte words it is made of. Free of torch and aiohttp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from encoder.errors import EncoderPoolError
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


def words(tokens: ItemTokens) -> np.ndarray:
    """Tokens `[rows, width]` in their own dtype; bfloat16 as uint16 words. A view of the data."""
    return np.frombuffer(tokens.data, dtype=ITEM_DTYPES[tokens.dtype]).reshape(tokens.shape)


def as_float32(tokens: ItemTokens) -> np.ndarray:
    """Tokens `[rows, width]` as float32."""
    return numbers_of(words(tokens), tokens.dtype)


def numbers_of(found: np.ndarray, dtype: str) -> np.ndarray:
    """Words as float32; `dtype` is a key of ITEM_DTYPES."""
    if dtype == "bfloat16":
        return (found.astype(np.uint32) << 16).view(np.float32)
    return found.astype(np.float32, copy=False)
