"""What travels over HTTP, and the strict reader of what strangers send."""

from __future__ import annotations

import json
import struct
from contextlib import suppress

import msgpack
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cluster.gateway.item_maps import json_item, msgpack_answer, msgpack_item, read_answer_item
from cluster.gateway.msgpack_reader import ReadLimits, read_msgpack
from cluster.gateway.requests import read_request, write_request
from cluster.gateway.wire import (
    ITEM_DTYPES,
    JSON,
    MSGPACK,
    EncodeOptions,
    EncodeRequest,
    ItemAnswer,
    ItemTokens,
    RequestItem,
    as_float32,
)
from encoder.errors import RequestError

LIMITS = ReadLimits(max_values=1000, max_depth=6)

leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=300)
    | st.binary(max_size=300)
)
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=40), inner, max_size=20),
    max_leaves=12,
)


def plain(value: object) -> object:
    """Views as bytes, to compare."""
    if isinstance(value, memoryview):
        return bytes(value)
    if isinstance(value, list):
        return [plain(entry) for entry in value]
    return {key: plain(entry) for key, entry in value.items()} if isinstance(value, dict) else value


@given(values)
@example([b"x" * 70_000, "y" * 60_000, [1] * 300, {str(number): 1.5 for number in range(300)}])
def test_the_reader_reads_what_msgpack_writes(value: object) -> None:
    assert plain(read_msgpack(msgpack.packb(value), ReadLimits(max_values=1000, max_depth=20))) == value


@given(st.binary(max_size=300))
@example(b"\x81" * 200)
@example(b"\xdd\xff\xff\xff\xff" * 40)
@example(b"\xc6\xff\xff\xff\xff")
def test_any_bytes_are_a_value_or_a_typed_error(body: bytes) -> None:
    for read in (
        lambda: read_msgpack(body, LIMITS),
        lambda: read_request(body, MSGPACK, max_items=8),
        lambda: read_request(body, JSON, max_items=8),
    ):
        with suppress(RequestError):
            read()


@given(values, st.data())
def test_a_request_with_anything_changed_in_it_is_a_value_or_a_typed_error(value: object, data: st.DataObject) -> None:
    body = bytearray(msgpack.packb({"items": [b"picture", {"data": b"x", "id": "a"}], "timeout_s": 1.5, "x": value}))
    for _ in range(data.draw(st.integers(0, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    with suppress(RequestError):
        assert isinstance(read_request(body, MSGPACK, max_items=8), EncodeRequest)


def test_values_are_counted_before_memory_is_spent() -> None:
    empty_lists = b"\xdc" + struct.pack(">H", 60_000) + b"\x90" * 60_000
    with pytest.raises(RequestError, match="an array of 60000, more values than a request may have"):
        read_msgpack(empty_lists, LIMITS)
    with pytest.raises(RequestError, match="nested deeper"):
        read_msgpack(b"\x91" * 100 + b"\xc0", LIMITS)


def test_binary_is_read_without_a_copy() -> None:
    body = bytearray(msgpack.packb({"items": [b"picture"]}))
    (item,) = read_request(body, MSGPACK, max_items=8).items
    body[-1] = ord("E")
    assert bytes(item.data or b"") == b"picturE"


@given(
    st.lists(
        st.builds(RequestItem, data=st.binary(max_size=50), item_id=st.none() | st.text(max_size=20))
        | st.builds(RequestItem, url=st.just("https://example.org/a.png"), item_id=st.none() | st.text(max_size=20)),
        min_size=1,
        max_size=8,
    ),
    st.builds(
        EncodeOptions, timeout_s=st.none() | st.floats(0.001, 1e4), stream=st.booleans(), model=st.none() | st.text()
    ),
)
def test_a_request_comes_back_as_it_was_written(items: list[RequestItem], options: EncodeOptions) -> None:
    read = read_request(write_request(items, options), MSGPACK, max_items=8)
    assert read == EncodeRequest(items=tuple(items), options=options)


def answer(dtype: str, rows: int, width: int) -> ItemAnswer:
    words = np.random.default_rng(0).integers(0, 2**15, rows * width).astype(ITEM_DTYPES[dtype])
    tokens = ItemTokens(
        dtype=dtype,
        shape=(rows, width),
        data=words.tobytes(),
        grids=((1, 2, 3), (1, 4, 5)),
        graphs=("g",),
        misses=("too long",),
        timings_ms={"decode": 1.5},
        note="first of 2 frames",
        worker="worker-0",
    )
    return ItemAnswer(index=3, status=200, item_id="x", tokens=tokens)


@pytest.mark.parametrize("dtype", ITEM_DTYPES)
def test_an_item_of_an_answer_comes_back_as_it_was_written(dtype: str) -> None:
    sent = answer(dtype, 5, 7)
    failed = ItemAnswer(index=0, status=422, error="BadMediaError", message="no")
    entries = msgpack.unpackb(b"".join(msgpack_answer("m", [sent, failed])))["items"]
    assert [read_answer_item(entry) for entry in entries] == [sent, failed]
    assert read_answer_item(msgpack.unpackb(b"".join(msgpack_item(sent)))) == sent
    with pytest.raises(RequestError, match="no item of an answer"):
        read_answer_item(entries[0] | {"shape": [5, 8]})


def test_bfloat16_words_are_the_numbers_that_torch_reads() -> None:
    import torch

    numbers_TE = torch.randn(4, 6).to(torch.bfloat16)
    data = numbers_TE.view(torch.uint8).numpy().tobytes()
    tokens = ItemTokens(dtype="bfloat16", shape=(4, 6), data=data, grids=())
    np.testing.assert_array_equal(as_float32(tokens), numbers_TE.float().numpy())
    sent = ItemAnswer(index=0, status=200, tokens=tokens)
    assert json.loads(b"".join(json_item(sent, "float")))["data"] == numbers_TE.float().tolist()
