"""Content that workers died of: refused by every client of the pool, bounded, forgiven after a time."""

from __future__ import annotations

import numpy as np
import pytest
from fakes import Clock
from hypothesis import given
from hypothesis import strategies as st

from cluster.routing.quarantine import Edition, Quarantine
from cluster.streams.trials import RECENT_S, Trials
from encoder.errors import PoisonItemError


def content(number: int) -> np.ndarray:
    return np.full(8, number, np.uint8)


class Pool:
    """A router's quarantine and two clients that hear of it with every lease."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.router = Quarantine(now_s=self.clock)
        self.clients = [
            Trials(quarantine_s=100.0, tell=lambda left_s: bool(self.router.add(left_s)) and None, now_s=self.clock)
            for _ in range(2)
        ]

    def ask(self, client: Trials) -> None:
        client.hear(self.router.news(client.heard))

    def refuses(self, client: Trials, number: int) -> bool:
        try:
            client.refuse_poison(content(number))
        except PoisonItemError:
            return True
        return False


def test_all_clients_hear_what_one_puts_into_quarantine() -> None:
    pool = Pool()
    one, other = pool.clients
    one.quarantine(content(1))
    assert pool.refuses(one, 1)
    assert not pool.refuses(other, 1)
    pool.ask(other)
    assert pool.refuses(other, 1)
    assert not pool.refuses(other, 2)
    assert pool.router.news(other.heard) is None


def test_content_is_forgiven_after_its_time() -> None:
    pool = Pool()
    one, other = pool.clients
    one.quarantine(content(1))
    pool.clock.now += 60
    pool.ask(other)
    pool.clock.now += 39
    assert pool.refuses(other, 1)
    pool.clock.now += 2
    assert not pool.refuses(one, 1)
    assert not pool.refuses(other, 1)


def test_a_router_that_lost_its_memory_is_told_again() -> None:
    pool = Pool()
    one, other = pool.clients
    one.quarantine(content(1))
    pool.ask(one)
    pool.router = Quarantine(now_s=pool.clock)
    pool.ask(one)
    assert len(pool.router) == 1
    pool.ask(other)
    assert pool.refuses(other, 1)


@given(numbers=st.lists(st.integers(0, 60), max_size=80))
def test_the_list_is_bounded_and_forgives_the_oldest_first(numbers: list[int]) -> None:
    clock = Clock()
    quarantine = Quarantine(now_s=clock, max_digests=16)
    order: dict[int, None] = {}
    for number in numbers:
        before = quarantine.edition
        is_new = quarantine.add({bytes([number]): 1e6})
        if number not in order:
            order[number] = None
            while len(order) > 16:
                del order[next(iter(order))]
        assert (quarantine.edition != before) == is_new
        assert [digest[0] for digest in quarantine.left_s()] == list(order)


def test_news_come_only_to_those_who_know_another_edition() -> None:
    quarantine = Quarantine(now_s=Clock())
    assert quarantine.news(None) is None
    assert quarantine.news(Edition("an earlier router", 3)) is not None
    quarantine.add({b"a": 5.0})
    news = quarantine.news(None)
    assert news is not None
    assert news.left_s == {b"a": pytest.approx(5.0)}
    assert quarantine.news(news.edition) is None


def test_deaths_of_other_workers_speak_for_an_item() -> None:
    clock = Clock()
    trials = Trials(now_s=clock)
    assert trials.blame(content(1), "a/0", alone=False) == 1
    trials.note_death("a/0")
    assert trials.blame(content(1), "b/0", alone=True) == 2  # both died with it
    for name in ("c/0", "d/0", "e/0"):
        trials.note_death(name)
    assert trials.blame(content(1), "b/1", alone=True) == 1  # three died without it: two doubts at most
    clock.now += RECENT_S + 1
    assert trials.blame(content(1), "b/2", alone=True) == 1  # the others are long ago


def test_content_that_is_on_board_everywhere_is_not_to_blame_for_it() -> None:
    trials = Trials(now_s=Clock())
    for number in range(9):
        assert trials.blame(content(1), f"a/{number}", alone=False) == 1
    assert trials.blame(content(1), "b/0", alone=True) == 2
    assert trials.blame(content(2), "b/0", alone=False) == 1
