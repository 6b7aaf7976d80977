from io import StringIO
from types import SimpleNamespace
from typing import Any

from cluster.files.progress import MAX_ERROR_LINES, EncodeProgress
from encoder.errors import PoolError
from workers.cache import CacheStats


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    """Turned by hand."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def stats() -> Any:
    return SimpleNamespace(hit_rate=0.975, fill=0.5, cache=CacheStats())


def test_a_pipe_gets_a_line_every_few_seconds() -> None:
    clock, stream = Clock(), StringIO()
    with EncodeProgress(40, stats, stream=stream, now_s=clock) as progress:
        for _ in range(40):
            clock.now_s += 0.3
            progress.advance()
    assert stream.getvalue().splitlines() == [
        "encpool: 17/40 items, 3.3 items/s, hit rate 98%, fill 50%",
        "encpool: 34/40 items, 3.3 items/s, hit rate 98%, fill 50%",
    ]


def test_a_pool_with_a_cache_says_what_it_answered_from_it() -> None:
    cached = SimpleNamespace(hit_rate=1.0, fill=1.0, cache=CacheStats(hits=2, joins=1, misses=1, max_bytes=100))
    with EncodeProgress(1, lambda: cached, stream=StringIO(), now_s=Clock()) as progress:
        assert progress.rates().endswith("hit rate 100%, fill 100%, 75% from the cache")


def test_a_terminal_gets_a_bar() -> None:
    clock, stream = Clock(), Terminal()
    with EncodeProgress(4, stats, stream=stream, now_s=clock) as progress:
        for _ in range(4):
            clock.now_s += 1.0
            progress.advance()
    assert "4/4" in stream.getvalue()
    assert "hit rate 98%" in stream.getvalue()


def test_a_pool_that_does_not_tell_its_counts_stops_nothing() -> None:
    def silent() -> Any:
        raise PoolError("the router does not answer")

    clock, stream = Clock(), StringIO()
    with EncodeProgress(2, silent, stream=stream, now_s=clock) as progress:
        clock.now_s = 10.0
        progress.advance()
    assert stream.getvalue() == "encpool: 1/2 items, 0.1 items/s\n"


def test_errors_are_shown_up_to_a_number() -> None:
    stream = StringIO()
    with EncodeProgress(50, stats, stream=stream, now_s=Clock()) as progress:
        for number in range(50):
            progress.advance(f"{number}.jpg: broken [/odd]")
    lines = stream.getvalue().splitlines()
    assert len(lines) == MAX_ERROR_LINES + 1
    assert lines[0] == "encpool: 0.jpg: broken [/odd]"
    assert progress.num_failed == 50
