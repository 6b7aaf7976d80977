"""Content goes back to the worker that has it in its cache, while that is no later than elsewhere."""

from __future__ import annotations

import random

import pytest
from fakes import TOKENS, Clock, fake_adapter, graph, report
from hypothesis import given
from hypothesis import strategies as st

from cluster.routing.affinity import HIT_SHARE, Homes
from cluster.routing.leases import Lease, LeaseRequest
from cluster.routing.router import Router
from encoder.types import ItemShape

SHAPE = ItemShape(grids=((1, 10, 10),), num_patches=100, num_tokens=TOKENS)
COST_MS = 1.0


def router(names: str = "abc", *, cache_tokens: int = 1000, seed: int = 0) -> Router:
    made = Router(fake_adapter(), lease_timeout_s=60, silent_timeout_s=1e9, now_s=Clock(), rng=random.Random(seed))
    for name in names:
        made.register(report(name, graphs=(graph(16, cost_ms=8 * COST_MS),), cache_tokens=cache_tokens))
    return made


def send(router: Router, *digests: int, exclude: frozenset[str] = frozenset()) -> list[Lease]:
    answers = router.assign([LeaseRequest(shape=SHAPE, digest=digest, exclude=exclude) for digest in digests])
    leases = [answer for answer in answers if isinstance(answer, Lease)]
    assert len(leases) == len(answers)
    return leases


def settle(router: Router, leases: list[Lease]) -> None:
    router.release([lease.lease_id for lease in leases])


def in_flight_ms(router: Router) -> dict[str, float]:
    return {member.worker_id: member.in_flight_ms for member in router.members()}


def test_the_same_content_goes_where_it_was_and_counts_little() -> None:
    pool = router()
    first = send(pool, *range(1, 31))
    assert {lease.worker_id for lease in first} == set("abc")
    settle(pool, first)
    again = send(pool, *range(1, 31))
    assert [lease.worker_id for lease in again] == [lease.worker_id for lease in first]
    assert sum(in_flight_ms(pool).values()) < 30 * COST_MS * HIT_SHARE * 1.01
    settle(pool, again)
    assert set(in_flight_ms(pool).values()) == {0.0}


def test_items_without_a_digest_have_no_home() -> None:
    pool = router()
    settle(pool, send(pool, 7, 0, 0, 0))
    assert [lease.cost_ms for lease in send(pool, 0, 0, 7)] == [COST_MS, COST_MS, pytest.approx(COST_MS * HIT_SHARE)]


def test_copies_in_one_ask_go_to_one_worker() -> None:
    assert len({lease.worker_id for lease in send(router(), 7, 7, 7, 7)}) == 1


def test_a_backlog_that_outweighs_the_saving_sends_it_elsewhere() -> None:
    pool = router("ab")
    settle(pool, first := send(pool, 7))
    home = first[0].worker_id
    other = {"a": "b", "b": "a"}[home]
    blocked = frozenset({f"{other}/0"})
    send(pool, 0, exclude=blocked)
    assert send(pool, 7)[0].worker_id == home  # behind 1 ms of work, or after 1 ms elsewhere
    send(pool, 0, exclude=blocked)
    assert send(pool, 7)[0].worker_id == other  # it would be later by more than the 1 ms it saves
    send(pool, 0, 0, exclude=frozenset({f"{home}/0"}))
    assert send(pool, 7)[0].worker_id == other, "its home is where it went last"


def test_an_excluded_or_lost_home_gets_nothing() -> None:
    pool = router("ab")
    settle(pool, first := send(pool, 7))
    home = first[0].worker_id
    assert send(pool, 7, exclude=frozenset({f"{home}/0"}))[0].worker_id != home
    pool = router("ab")
    settle(pool, first := send(pool, 7))
    pool.suspect(first[0].incarnation)
    assert send(pool, 7)[0].worker_id != first[0].worker_id


def test_a_restarted_worker_has_nothing_in_its_cache() -> None:
    pool = router("ab")
    settle(pool, first := send(pool, 7))
    name = first[0].worker_id
    pool.register(report(name, incarnation=f"{name}/1", graphs=(graph(16, cost_ms=8),), cache_tokens=1000))
    assert in_flight_ms(pool) == {"a": 0.0, "b": 0.0}
    assert sum(lease.cost_ms for lease in send(pool, 7)) == COST_MS


def test_a_worker_that_was_only_suspected_keeps_its_contents() -> None:
    pool = router("a")
    settle(pool, first := send(pool, 7))
    pool.suspect(first[0].incarnation)
    pool._now_s.now += 10  # type: ignore[attr-defined]
    pool.register(report("a", graphs=(graph(16, cost_ms=8),), cache_tokens=1000))
    assert send(pool, 7)[0].cost_ms < COST_MS


def test_workers_without_a_cache_are_nobodys_home() -> None:
    pool = router(cache_tokens=0)
    settle(pool, send(pool, 7))
    assert send(pool, 7)[0].cost_ms == COST_MS


def test_no_more_is_expected_of_a_worker_than_its_cache_holds() -> None:
    pool = router("a", cache_tokens=10 * TOKENS)
    settle(pool, send(pool, *range(1, 101)))
    costs = [lease.cost_ms for lease in send(pool, *range(100, 0, -1))]
    assert costs[:5] == [COST_MS * HIT_SHARE] * 5, "the latest ones"
    assert sum(cost < COST_MS for cost in costs) <= 11


Steps = st.lists(st.tuples(st.integers(1, 30), st.sampled_from("ab"), st.integers(1, 8)), max_size=100)


@given(Steps)
def test_what_is_remembered_of_a_worker_is_bounded_and_the_books_balance(steps: list[tuple[int, str, int]]) -> None:
    homes = Homes(max_digests=20)
    for name in "ab":
        homes.open(name, f"{name}/0", 40)
    size: dict[int, int] = {}
    for digest, name, num_tokens in steps:
        num_tokens = size.setdefault(digest, num_tokens)
        homes.note(digest, name, num_tokens)
        assert len(homes) <= 20 + 1
        for shelf_name in "ab":
            held = {digest for digest in size if homes.find(digest) == shelf_name}
            assert held <= homes._shelves[shelf_name].younger | homes._shelves[shelf_name].older
            assert sum(size[digest] for digest in held) <= 40 + 2 * 8
    for name in "ab":
        homes.close(name)
    assert len(homes) == 0
