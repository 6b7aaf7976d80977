"""Memory lent for a call: bytes go in it, tokens come back in it, and nobody writes to what somebody else reads."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest
from fakes import TOKENS, Clock, FakeRunner, errors, item, loader, picture

from cluster.streams.slabs import IDLE_S, KEPT_BYTES, MIN_SLAB_BYTES, Lent, Slabs
from encoder.config import EncoderConfig
from encoder.travel import MESSAGE_BYTES, from_bytes, to_bytes
from workers.config import WorkerConfig
from workers.messages import EncodeBatch, EncodeResult
from workers.slabs import KEPT_S, SlabMaps, encode_lent
from workers.worker import EncoderWorker

LARGE = [picture(7) + bytes(MESSAGE_BYTES), picture(9, width=300) + b"\1" * MESSAGE_BYTES]


class Near:
    """A worker in this process, which opens slabs as one in another process does."""

    def __init__(self, worker: EncoderWorker, settled: list[int]) -> None:
        self.worker, self.settled = worker, settled
        self.clock = Clock()
        self.maps = SlabMaps(now_s=self.clock)
        self.got: list[EncodeBatch] = []

    def encode(self, batch: EncodeBatch, room: np.ndarray | None = None) -> EncodeResult:
        self.got.append(batch)
        return self.worker.encode(batch, room)

    def refuse(self, *refused: object) -> EncodeResult:
        return self.worker.refuse(*refused)  # type: ignore[arg-type]

    def call(self, batch: EncodeBatch) -> EncodeResult:
        """There and back as bytes."""
        result = encode_lent(self, self.maps, from_bytes(to_bytes(batch)))
        again: EncodeResult = from_bytes(to_bytes(result))
        return again


@pytest.fixture
def near() -> Iterator[Near]:
    settled: list[int] = []
    with ExitStack() as stack:
        config = WorkerConfig(encoder=EncoderConfig(model="fake"), device="cpu", decode_threads=1)
        worker = EncoderWorker(config, "w", load=loader(FakeRunner()), on_settled=settled.append)
        stack.callback(worker.close)
        worker.start()
        worker.wait_started(20)
        yield Near(worker, settled)


def batch(contents: Sequence[bytes] = LARGE, *, num_outputs: int = 10**5) -> EncodeBatch:
    return EncodeBatch(call_id="call", items=tuple(map(item, range(len(contents)), contents)), num_outputs=num_outputs)


def lend(slabs: Slabs, batch: EncodeBatch) -> tuple[EncodeBatch, Lent]:
    sent, lent = slabs.lend("w", batch)
    assert lent is not None
    return sent, lent


def encode(slabs: Slabs, near: Near) -> EncodeResult:
    sent, lent = lend(slabs, batch())
    return slabs.receive(lent, near.call(sent))


def brightness(result: EncodeResult) -> list[float]:
    tokens_TE: list[float] = result.tokens_TE[:, 0].tolist()
    return tokens_TE


BRIGHTNESS = [7.0] * TOKENS + [9.0] * 3 * TOKENS


def test_tokens_come_back_in_the_slab_and_bytes_go_in_it_once_it_was_reached(near: Near) -> None:
    slabs = Slabs(2**30)
    sent, lent = lend(slabs, batch())
    assert sent.items[0].encoded.nbytes == len(LARGE[0]), "nobody knows yet whether the worker reaches it"
    answer = near.call(sent)
    assert answer.shared == (4 * TOKENS, 4)
    assert answer.tokens_TE.nbytes == 0
    assert brightness(slabs.receive(lent, answer)) == BRIGHTNESS
    sent, lent = lend(slabs, batch())
    assert [item.encoded.nbytes for item in sent.items] == [0, 0]
    assert len(to_bytes(sent)) < 1000
    assert brightness(slabs.receive(lent, near.call(sent))) == BRIGHTNESS
    assert [item.encoded.tobytes() for item in near.got[-1].items] == LARGE


def test_a_slab_is_lent_again_only_when_nobody_has_its_tokens(near: Near) -> None:
    slabs = Slabs(2**30)
    first = encode(slabs, near)
    rows = first.tokens_TE[:2]
    del first
    second = encode(slabs, near)
    assert slabs.num_bytes == 2 * MIN_SLAB_BYTES
    assert rows[:, 0].tolist() == [7.0] * 2
    del rows, second
    for _ in range(5):
        encode(slabs, near)
    assert slabs.num_bytes == 2 * MIN_SLAB_BYTES
    assert len(near.maps) == 2


def test_a_slab_whose_call_was_never_answered_is_closed_and_not_lent_again(near: Near) -> None:
    slabs = Slabs(2**30)
    num_open = len(os.listdir("/proc/self/fd"))
    sent, lent = lend(slabs, batch())
    assert len(os.listdir("/proc/self/fd")) > num_open
    name = lent.loan.name
    del lent
    gc.collect()
    assert slabs.num_bytes == 0
    assert len(os.listdir("/proc/self/fd")) == num_open
    assert lend(slabs, batch())[1].loan.name != name
    assert near.call(sent).shared is None, "it comes late, and finds nothing"


def test_an_item_keeps_its_bytes_when_the_slab_goes_to_another_call(near: Near) -> None:
    slabs = Slabs(2**30)
    for _ in range(2):
        encode(slabs, near)
    _, lent = lend(slabs, batch([picture(2) + b"\2" * 2 * MESSAGE_BYTES, picture(3)]))
    assert lent.loan.name == loan_of(near.got[-1])
    assert lent.slab.bytes_at(2 * MESSAGE_BYTES, 1)[0] == 2
    assert [item.encoded.tobytes() for item in near.got[-1].items] == LARGE


def loan_of(sent: EncodeBatch) -> str:
    assert sent.loan is not None
    return sent.loan.name


def out_of_reach(sent: EncodeBatch, **changes: object) -> EncodeBatch:
    assert sent.loan is not None
    return replace(sent, loan=replace(sent.loan, **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "elsewhere",
    [
        pytest.param({"pid": 2**22 + 1}, id="no such process"),
        pytest.param({"name": "encpool-another"}, id="another slab"),
        pytest.param({"fd": 0}, id="another file"),
        pytest.param({"num_bytes": 2**40}, id="too short"),
    ],
)
def test_a_worker_that_cannot_reach_it_answers_by_itself_and_is_lent_no_more(
    near: Near, elsewhere: dict[str, object]
) -> None:
    slabs = Slabs(2**30)
    sent, lent = lend(slabs, batch())
    assert brightness(slabs.receive(lent, near.call(out_of_reach(sent, **elsewhere)))) == BRIGHTNESS
    assert slabs.lend("w", batch())[1] is None
    assert slabs.lend("another", batch())[1] is not None
    slabs.forget("w")
    assert slabs.lend("w", batch())[1] is not None


def test_a_worker_that_reaches_it_no_more_takes_nothing_on_board_and_is_sent_it_all(near: Near) -> None:
    slabs = Slabs(2**30)
    encode(slabs, near)
    near.settled.clear()
    near.maps = SlabMaps()  # it started again, on another machine
    sent, lent = lend(slabs, batch())
    answer = slabs.receive(lent, near.call(out_of_reach(sent, pid=2**22 + 1)))
    assert errors(answer) == ["PoolSaturatedError"] * 2
    assert sorted(near.settled) == [0, 1]
    sent, nothing = slabs.lend("w", batch())
    assert nothing is None
    assert brightness(near.call(sent)) == BRIGHTNESS


def test_what_does_not_fit_comes_back_by_itself(near: Near) -> None:
    slabs = Slabs(2**30)
    sent, lent = lend(slabs, batch())
    answer = near.call(out_of_reach(sent, room_at=MIN_SLAB_BYTES - 16))
    assert answer.shared is None
    assert brightness(slabs.receive(lent, answer)) == BRIGHTNESS
    assert slabs.lend("w", batch())[1] is not None, "it was reached"


@pytest.mark.parametrize(
    ("slabs", "contents", "num_outputs"),
    [
        pytest.param(Slabs(0), LARGE, 10**5, id="none are allowed"),
        pytest.param(Slabs(2**21), LARGE, 2**20, id="too large for all together"),
        pytest.param(Slabs(2**40), LARGE, 2**30, id="too large for one"),
        pytest.param(Slabs(2**30), LARGE[:1], 2**10, id="small tokens, and bytes for whom nobody knows"),
        pytest.param(Slabs(2**30), LARGE, 0, id="nobody knows how many tokens"),
    ],
)
def test_other_calls_go_without(slabs: Slabs, contents: list[bytes], num_outputs: int) -> None:
    call = batch(contents, num_outputs=num_outputs)
    sent, lent = slabs.lend("w", call)
    assert sent is call
    assert lent is None
    assert slabs.num_bytes == 0


def test_idle_slabs_are_closed_but_for_small_ones(near: Near) -> None:
    clock = Clock()
    slabs = Slabs(2**40, now_s=clock)
    for large in (KEPT_BYTES, MIN_SLAB_BYTES):
        slabs.forget("w")  # or the bytes would need room beside the tokens
        calls = [lend(slabs, batch(num_outputs=large // 4)) for _ in range(2)]
        for sent, lent in calls:
            slabs.receive(lent, near.call(sent))
        del calls, sent, lent
    gc.collect()
    slabs.trim()
    assert slabs.num_bytes == 2 * KEPT_BYTES + 2 * MIN_SLAB_BYTES
    clock.now += IDLE_S
    slabs.trim()
    assert slabs.num_bytes == 2 * MIN_SLAB_BYTES


def test_a_worker_closes_what_nobody_lends_any_more(near: Near) -> None:
    slabs = Slabs(2**30)
    encode(slabs, near)
    near.clock.now += KEPT_S - 1
    near.maps.sweep()
    assert len(near.maps) == 1
    encode(slabs, near)
    near.clock.now += KEPT_S - 1
    near.maps.sweep()
    assert len(near.maps) == 1
    near.clock.now += 2
    near.maps.sweep()
    assert len(near.maps) == 0
    assert brightness(encode(slabs, near)) == BRIGHTNESS


def test_without_such_memory_calls_go_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> int:
        raise OSError("no more files")

    make: Callable[..., int] = fails
    monkeypatch.setattr(os, "memfd_create", make)
    assert Slabs(2**30).lend("w", batch())[1] is None
    monkeypatch.delattr(os, "memfd_create")
    assert Slabs(2**30).lend("w", batch())[1] is None
