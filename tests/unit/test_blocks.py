"""Blocks that outputs arrive in: never two readers of one, never more than the limit."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from encoder.blocks import LEAST_BYTES, BlockPool
from encoder.staging import Slot, StagingRing


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.data_ptr() < other.data_ptr() + other.nbytes and other.data_ptr() < one.data_ptr() + one.nbytes
    )  # fmt: skip


@given(st.lists(st.tuples(st.integers(1, 1 << 20), st.integers(0, 3)), max_size=60))
def test_no_two_readers_share_memory_and_the_limit_holds(takes: list[tuple[int, int]]) -> None:
    pool = BlockPool(pinned=False, limit_bytes=4 << 20)
    lent: list[torch.Tensor] = []
    for number, (num_bytes, returned) in enumerate(takes):
        block = pool.take(num_bytes)
        assert pool.num_bytes <= 4 << 20
        if block is None:
            assert sum(len(view) for view in lent) + 2 * max(num_bytes, LEAST_BYTES) > 4 << 20
        else:
            assert len(block.memory) >= num_bytes
            block.memory[:num_bytes] = number % 256
            view = block.lend()
            del block
            assert not any(overlap(view, other) for other in lent)
            lent.append(view)
        del lent[:returned]


def test_a_block_stays_lent_as_long_as_a_part_of_it_is_read() -> None:
    pool = BlockPool(pinned=False, limit_bytes=LEAST_BYTES)
    block = pool.take(LEAST_BYTES)
    assert block is not None
    block.memory.fill_(7)
    rows = block.lend()[:512].view(torch.bfloat16).view(2, 128).split([1, 1])
    last = rows[1].view(torch.uint16).numpy()
    del block, rows
    assert pool.take(1) is None
    assert (last == 0x0707).all()
    del last
    assert pool.take(1) is not None


def test_blocks_come_back_from_other_threads() -> None:
    pool = BlockPool(pinned=False, limit_bytes=LEAST_BYTES)
    block = pool.take(1)
    assert block is not None
    views = [block.lend()]
    del block
    thread = threading.Thread(target=views.clear)
    thread.start()
    thread.join()
    assert pool.take(1) is not None


def test_what_was_given_up_is_never_lent_again() -> None:
    pool = BlockPool(pinned=False, limit_bytes=LEAST_BYTES)
    block = pool.take(1)
    assert block is not None
    address = block.memory.data_ptr()
    held = block.memory  # as a copy under way would
    block.give_up()
    del block
    again = pool.take(1)
    assert again is not None
    assert again.memory.data_ptr() != address
    assert len(held) == pool.num_bytes


@pytest.mark.parametrize("num_bytes", [1, LEAST_BYTES, LEAST_BYTES + 1, 3 * LEAST_BYTES])
def test_free_blocks_of_other_sizes_make_room(num_bytes: int) -> None:
    pool = BlockPool(pinned=False, limit_bytes=4 * LEAST_BYTES)
    first = [pool.take(LEAST_BYTES) for _ in range(4)]
    assert None not in first
    assert pool.take(num_bytes) is None
    first.clear()
    gc.collect()
    assert pool.take(num_bytes) is not None


def test_where_the_system_has_no_memory_the_pool_has_not_taken_any(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no memory")

    pool = BlockPool(pinned=False, limit_bytes=LEAST_BYTES)
    with monkeypatch.context() as short:
        short.setattr(torch, "empty", fail)
        with pytest.raises(RuntimeError, match="no memory"):
            pool.take(1)
    assert pool.take(1) is not None


def run(ring: StagingRing, number: int, num_rows: int) -> torch.Tensor:
    """A launch whose output is `num_rows` rows of its number."""
    shape = (num_rows, 64)
    with ring.slot(1, 4 * num_rows * 64) as slot, ring.computing(slot, 1):
        slot.keep(torch.full(shape, float(number)))
    with ring.returning(slot):
        return slot.wait(torch.float32, shape)


@given(st.lists(st.tuples(st.integers(1, 600), st.integers(0, 3)), max_size=40))
def test_outputs_that_are_held_stay_as_they_were(launches: list[tuple[int, int]]) -> None:
    """With and without a block left for them."""
    ring = StagingRing(torch.device("cpu"), 3, limit_bytes=4 * LEAST_BYTES)
    held: list[tuple[int, torch.Tensor]] = []
    for number, (num_rows, returned) in enumerate(launches):
        held.append((number, run(ring, number, num_rows)))
        del held[:returned]
        assert all(bool((rows == value).all()) for value, rows in held)


def fail(ring: StagingRing, begun: list[Slot]) -> None:
    """A launch that has its slot, and then breaks."""
    with ring.slot(1, 64) as slot:
        begun.append(slot)
        raise ValueError("broken")


def test_a_launch_that_fails_takes_its_block_with_it() -> None:
    ring = StagingRing(torch.device("cpu"), 3, limit_bytes=LEAST_BYTES)
    begun: list[Slot] = []
    with pytest.raises(ValueError, match="broken"):
        fail(ring, begun)
    written_late = begun[0]._host_out
    rows = run(ring, 5, 1)
    written_late.zero_()
    assert bool((rows == 5).all())
