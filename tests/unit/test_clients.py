"""Clients that fall silent: their leases end, and workers drop what they hold of them, unless they speak again."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator

import pytest
from fakes import Clock, FakeRunner, fake_adapter, graph, item, loader, picture, report

from cluster.routing.leases import Lease, LeaseRequest
from cluster.routing.router import Router
from cluster.streams.presence import Presence
from encoder.config import EncoderConfig
from encoder.errors import PoolClosedError
from workers.calls import REMEMBERED_S
from workers.config import WorkerConfig
from workers.job import Job
from workers.messages import EncodeBatch, EncodeResult
from workers.worker import EncoderWorker


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def router(clock: Clock) -> Router:
    made = Router(
        fake_adapter(),
        lease_timeout_s=60,
        silent_timeout_s=1e9,
        client_timeout_s=10,
        now_s=clock,
        rng=random.Random(0),
    )
    made.register(report("w", max_queue_ms=1000))
    return made


def lease(router: Router, client: str) -> Lease:
    (answer,) = router.assign([LeaseRequest(shape=item(0, picture(1)).shape, num_bytes=7)], client=client)
    assert isinstance(answer, Lease)
    return answer


def test_leases_of_a_silent_client_end_and_those_of_others_stay(router: Router, clock: Clock) -> None:
    lease(router, "killed")
    kept = lease(router, "lives")
    for _ in range(4):
        clock.now += 3
        router.hello("lives")
    (member,) = router.members()
    assert member.in_flight_ms == kept.cost_ms
    assert (member.num_leases, member.in_flight_bytes) == (1, 7)


def test_workers_learn_who_is_gone_and_who_is_back(router: Router, clock: Clock) -> None:
    lease(router, "killed")
    assert router.silent_clients(["killed"]) == []
    clock.now += 11
    assert router.silent_clients(["killed"]) == ["killed"]
    router.hello("killed")  # it was only slow
    assert router.silent_clients(["killed"]) == []


def test_a_restarted_router_gives_a_client_it_never_heard_of_its_time(router: Router, clock: Clock) -> None:
    assert router.silent_clients(["old"]) == []
    clock.now += 9
    assert router.silent_clients(["old"]) == []
    clock.now += 2
    assert router.silent_clients(["old"]) == ["old"]


# --- at the worker ---------------------------------------------------------------------------------------------------


@pytest.fixture
def runner() -> FakeRunner:
    return FakeRunner([graph(2)])


@pytest.fixture
def worker(runner: FakeRunner, clock: Clock) -> Iterator[EncoderWorker]:
    config = WorkerConfig(encoder=EncoderConfig(model="fake"), device="cpu", decode_threads=1, cache_bytes=0)
    worker = EncoderWorker(config, "w", load=loader(runner), now_s=clock)
    worker.start()
    worker.wait_started(20)
    runner.runs.clear()
    yield worker
    runner.gate.set()
    worker.close()


def call(call_id: str, client: str, *brightness: int) -> EncodeBatch:
    items = tuple(item(number, picture(number)) for number in brightness)
    return EncodeBatch(call_id=call_id, items=items, client=client)


def errors(result: EncodeResult) -> list[str | None]:
    return [None if answer.error is None else answer.error.name for answer in result.items]


def test_a_worker_drops_what_it_holds_of_a_client_that_is_gone(worker: EncoderWorker, runner: FakeRunner) -> None:
    runner.gate.clear()
    results: dict[str, EncodeResult] = {}
    batches = [call("1", "killed", *range(6)), call("2", "lives", 100)]
    threads = [
        threading.Thread(target=lambda batch=batch: results.__setitem__(batch.call_id, worker.encode(batch)))
        for batch in batches
    ]
    for thread in threads:
        thread.start()
    while set(worker.clients()) != {"killed", "lives"} or worker.report().num_waiting < 4:
        threading.Event().wait(0.01)
    worker.give_up(["killed"])
    threads[0].join(20)
    assert errors(results["1"]) == ["PoolSaturatedError"] * 6
    runner.gate.set()
    threads[1].join(20)
    assert errors(results["2"]) == [None]
    assert len(runner.runs) <= 3  # two were under way
    assert worker.report().backlog_ms == 0


def test_calls_of_a_client_that_is_gone_are_refused_until_it_is_back(
    worker: EncoderWorker, runner: FakeRunner, clock: Clock
) -> None:
    worker.give_up(["killed"])
    assert errors(worker.encode(call("1", "killed", 1))) == ["PoolSaturatedError"]
    assert runner.runs == []
    assert worker.clients() == ["killed"]
    worker.give_up([])
    assert errors(worker.encode(call("2", "killed", 1))) == [None]
    worker.give_up(["killed"])
    clock.now += REMEMBERED_S + 1
    assert worker.clients() == []


def test_a_job_that_is_dropped_is_settled_once() -> None:
    settled: list[Job] = []
    job = Job(cost_ms=1.0)
    job.on_settled = settled.append
    job.fail(PoolClosedError("first"))
    job.fail(PoolClosedError("second"))
    assert settled == [job]


# --- at the client ---------------------------------------------------------------------------------------------------


def test_a_client_says_hello_while_a_stream_is_open_and_not_after() -> None:
    said = threading.Semaphore(0)
    presence = Presence(said.release, interval_s=0.01)
    presence.begin()
    for _ in range(3):
        assert said.acquire(timeout=10)
    presence.end()
    thread = presence._thread
    if thread is not None:
        thread.join(10)
        assert not thread.is_alive()
    while said.acquire(blocking=False):
        pass
    assert not said.acquire(timeout=0.1)
    presence.begin()
    assert said.acquire(timeout=10)
    presence.end()


def test_a_hello_that_fails_is_said_again() -> None:
    said = threading.Semaphore(0)
    failures = [OSError("boom"), OSError("boom")]

    def hello() -> None:
        if failures:
            raise failures.pop()
        said.release()

    presence = Presence(hello, interval_s=0.01)
    presence.begin()
    assert said.acquire(timeout=10)
    presence.end()


def test_hello_is_said_until_what_the_last_stream_left_is_idle() -> None:
    """With it a client closes the memory that nobody needs any more."""
    said_s: list[float] = []
    presence = Presence(lambda: said_s.append(time.monotonic()), interval_s=0.01, linger_s=0.2)
    presence.begin()
    thread = presence._thread
    presence.end()
    time.sleep(0.1)
    presence.begin()  # and closes at once, between two looks
    presence.end()
    ended_s = time.monotonic()
    assert thread is not None
    thread.join(10)
    assert said_s[-1] - ended_s > 0.19


def test_nobody_says_hello_to_a_closed_pool() -> None:
    def hello() -> None:
        raise PoolClosedError("the pool is closed")

    presence = Presence(hello, interval_s=0.01)
    presence.begin()
    thread = presence._thread
    assert thread is not None
    thread.join(10)
    assert not thread.is_alive()
