from collections.abc import Callable
from io import StringIO
from typing import Any

from fakes import report

from cluster.files.progress import MAX_ERROR_LINES, EncodeProgress
from cluster.lifecycle.stats import PoolStats
from encoder.errors import PoolError
from workers.cache import CacheStats
from workers.messages import WorkerStats


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    """Turned by hand."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def pool_stats(workers: dict[str, WorkerStats], life: int = 0) -> PoolStats:
    reports = tuple(report(name, incarnation=f"{name}/{life}", stats=stats) for name, stats in workers.items())
    return PoolStats(num_workers=len(reports), members=(), reports=reports)


def in_turn(*stats: PoolStats) -> Callable[[], PoolStats]:
    """These one after another, the last one again and again."""
    left = list(stats)
    return lambda: left.pop(0) if len(left) > 1 else left[0]


def working() -> Callable[[], PoolStats]:
    worked = WorkerStats(segment_hits=39, segment_misses={"size": 1}, useful_patches=50, run_patches=100)
    return in_turn(pool_stats({"a": WorkerStats()}), pool_stats({"a": worked}))


def test_a_pipe_gets_a_line_every_few_seconds() -> None:
    clock, stream = Clock(), StringIO()
    with EncodeProgress(40, working(), stream=stream, now_s=clock) as progress:
        for _ in range(40):
            clock.now_s += 0.3
            progress.advance()
    assert stream.getvalue().splitlines() == [
        "encpool: 17/40 items, 3.3 items/s, hit rate 98%, fill 50%",
        "encpool: 34/40 items, 3.3 items/s, hit rate 98%, fill 50%",
    ]


def test_what_the_pool_did_before_the_run_is_not_told_as_this_runs() -> None:
    before = WorkerStats(
        segment_hits=10,
        segment_misses={"size": 90},
        useful_patches=10,
        run_patches=100,
        cache=CacheStats(hits=100, misses=0, max_bytes=9),
    )
    after = WorkerStats(
        segment_hits=20,
        segment_misses={"size": 90},
        useful_patches=60,
        run_patches=200,
        cache=CacheStats(hits=101, joins=2, misses=1, max_bytes=9),
    )
    stats = in_turn(pool_stats({"a": before}), pool_stats({"a": after}))
    with EncodeProgress(1, stats, stream=StringIO(), now_s=Clock()) as progress:
        assert progress.rates().endswith("items/s, hit rate 100%, fill 50%, 75% from the cache")


def test_a_worker_that_started_anew_counts_from_its_start() -> None:
    before = pool_stats({"a": WorkerStats(segment_hits=100)})
    after = pool_stats({"a": WorkerStats(segment_hits=3, segment_misses={"size": 1})}, life=1)
    rates = after.rates_since(before)
    assert rates.hit_rate == 0.75
    assert rates.fill is None


def test_a_terminal_gets_a_bar() -> None:
    clock, stream = Clock(), Terminal()
    with EncodeProgress(4, working(), stream=stream, now_s=clock) as progress:
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
    with EncodeProgress(50, working(), stream=stream, now_s=Clock()) as progress:
        for number in range(50):
            progress.advance(f"{number}.jpg: broken [/odd]")
    lines = stream.getvalue().splitlines()
    assert len(lines) == MAX_ERROR_LINES + 1
    assert lines[0] == "encpool: 0.jpg: broken [/odd]"
    assert progress.num_failed == 50
