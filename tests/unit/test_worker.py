"""The worker: every item ends in exactly one result, whatever breaks on the way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import cast

import numpy as np
import pytest
import torch
from fakes import Clock, FakeRunner, batch, breaks_on, errors, graph, loader, picture, until

from cluster.lifecycle.stats import PoolStats
from encoder.config import EncoderConfig
from encoder.errors import EncodeError, WorkerLostError
from encoder.graphs import CaptureReport
from encoder.packing import EagerCost
from encoder.runner import EncoderRunner
from workers.answers import answer
from workers.config import WorkerConfig
from workers.counts import Counts
from workers.job import Job
from workers.messages import ErrorNote, WorkerState
from workers.metrics import Meter
from workers.worker import EncoderWorker

StartWorker = Callable[..., EncoderWorker]


@pytest.fixture
def settled() -> list[int]:
    return []


@pytest.fixture
def start_worker(settled: list[int]) -> Iterator[StartWorker]:
    with ExitStack() as stack:

        def start(
            runner: FakeRunner, *, now_s: Callable[[], float] = time.monotonic, **settings: object
        ) -> EncoderWorker:
            config = WorkerConfig.model_validate(
                {"encoder": EncoderConfig(model="fake"), "device": "cpu", "decode_threads": 2, **settings}
            )
            worker = EncoderWorker(config, "w", load=loader(runner), on_settled=settled.append, now_s=now_s)
            stack.callback(worker.close)
            stack.callback(runner.gate.set)
            worker.start()
            worker.wait_started(20)
            runner.runs.clear()
            return worker

        yield start


def message(error: ErrorNote | None) -> str:
    assert error is not None
    return error.message


def test_a_call_returns_one_array_with_an_offset_for_each_item(start_worker: StartWorker, settled: list[int]) -> None:
    worker = start_worker(FakeRunner())
    result = worker.encode(batch(picture(7, width=300), picture(9)))
    assert result.offsets == [0, 6, 8]
    assert result.tokens_TE[:, 0].tolist() == [7.0] * 6 + [9.0] * 2
    assert result.dtype == "float32"
    assert result.items[0].graphs == (str(graph().key),)
    assert result.items[0].timings_ms.keys() == {"decode", "wait", "replay"}
    assert sorted(settled) == [0, 1]


def test_bfloat16_travels_as_words(start_worker: StartWorker) -> None:
    runner = FakeRunner()
    runner.dtype = torch.bfloat16
    finish = runner.finish
    runner.finish = lambda launch: [tokens.bfloat16() for tokens in finish(launch)]  # type: ignore[method-assign]
    result = start_worker(runner).encode(batch(picture(7)))
    assert result.dtype == "bfloat16"
    assert result.tokens_TE.dtype == np.uint16
    assert torch.from_numpy(result.tokens_TE).view(torch.bfloat16).float().unique().tolist() == [7.0]


def test_a_broken_image_fails_alone(start_worker: StartWorker, settled: list[int]) -> None:
    good = picture(5)
    damaged = picture(6, width=90, height=90)
    call = batch(good, damaged[: len(damaged) // 2], good)
    assert errors(start_worker(FakeRunner()).encode(call)) == [None, "BadMediaError", None]
    assert sorted(settled) == [0, 1, 2]


def test_tokens_that_exceed_half_precision_are_an_error_of_their_item(start_worker: StartWorker) -> None:
    runner = FakeRunner()
    runner.dtype = torch.float16
    of_brightness = runner.finish
    runner.finish = lambda launch: [(500 * tokens).half() for tokens in of_brightness(launch)]  # type: ignore[method-assign]
    result = start_worker(runner).encode(batch(picture(1), picture(200, width=300), picture(2)))
    assert errors(result) == [None, "EncodeError", None]
    assert "float16" in message(result.items[1].error)
    assert result.tokens_TE[:, 0].tolist() == [500, 500, 1000, 1000]


def test_a_failing_replay_fails_only_the_guilty_item(start_worker: StartWorker) -> None:
    runner = FakeRunner()
    worker = start_worker(runner)
    runner.break_run = breaks_on(66, ValueError("boom"))
    result = worker.encode(batch(picture(1), picture(66, width=300), picture(2), picture(3)))
    assert errors(result) == [None, "EncodeError", None, None]
    assert "ValueError: boom" in message(result.items[1].error)
    assert result.tokens_TE[:, 0].tolist() == [1, 1, 2, 2, 3, 3]
    assert errors(worker.encode(batch(picture(4)))) == [None]


def test_a_replay_that_fails_once_is_made_good_eagerly_and_says_so(start_worker: StartWorker) -> None:
    runner = FakeRunner()
    worker = start_worker(runner)
    runner.break_run = lambda segments, replay: None if replay.key is None else RuntimeError("graph broke")
    result = worker.encode(batch(picture(1), picture(2)))
    assert errors(result) == [None, None]
    assert result.items[0].misses == ("replay_failed",)
    assert result.items[0].graphs == ()
    assert errors(worker.encode(batch(picture(3)))) == [None], "alone too"


def test_out_of_memory_halves_what_runs_at_once(start_worker: StartWorker) -> None:
    runner = FakeRunner()
    worker = start_worker(runner)
    runner.break_run = lambda segments, replay: torch.OutOfMemoryError("OOM") if len(segments) > 2 else None
    result = worker.encode(batch(*(picture(number) for number in range(8))))
    assert errors(result) == [None] * 8
    assert max(len(segments) for _, segments in runner.runs) <= 2
    assert len(worker.report().graphs) == 1


def test_out_of_memory_with_one_segment_drops_the_largest_graph(start_worker: StartWorker) -> None:
    runner = FakeRunner([graph(4), graph(16, longest=20_000)])
    worker = start_worker(runner)
    runner.break_run = lambda segments, replay: torch.OutOfMemoryError("OOM") if len(runner.views) > 1 else None
    assert errors(worker.encode(batch(picture(1)))) == [None]
    assert [view.key.token_budget for view in worker.report().graphs] == [4]


def test_no_graph_is_dropped_under_a_launch(start_worker: StartWorker) -> None:
    runner = FakeRunner([graph(2), graph(4, longest=20_000)])
    worker = start_worker(runner)
    runner.gate.clear()
    with ThreadPoolExecutor(2) as callers:
        first = callers.submit(worker.encode, batch(picture(1), call_id="first"))
        until(lambda: len(runner.runs) == 1)
        runner.break_run = lambda segments, replay: torch.OutOfMemoryError("OOM") if len(runner.views) > 1 else None
        second = callers.submit(worker.encode, batch(picture(2), call_id="second"))
        threading.Timer(0.1, runner.gate.set).start()
        assert [errors(call.result(20)) for call in (first, second)] == [[None], [None]]
    assert len(runner.views) == 1


def test_out_of_memory_that_nothing_helps_fails_the_item_alone(start_worker: StartWorker) -> None:
    runner = FakeRunner()
    worker = start_worker(runner)
    runner.break_run = breaks_on(66, torch.OutOfMemoryError("OOM"))
    assert errors(worker.encode(batch(picture(1), picture(66)))) == [None, "EncodeError"]


@pytest.mark.parametrize("kind", [torch.AcceleratorError, AssertionError])
def test_a_broken_device_or_state_fails_the_worker_and_everything_in_it(
    start_worker: StartWorker, kind: type[Exception]
) -> None:
    runner = FakeRunner()
    worker = start_worker(runner)
    runner.break_run = breaks_on(66, kind("CUDA error: illegal memory access"))
    assert errors(worker.encode(batch(picture(66)))) == ["WorkerLostError"]
    until(lambda: worker.report().state is WorkerState.FAILED)
    assert "illegal memory access" in message(worker.report().error)
    assert errors(worker.encode(batch(picture(1)))) == ["WorkerLostError"]


def test_two_replays_are_in_flight_and_never_more(start_worker: StartWorker) -> None:
    runner = FakeRunner([graph(2)])
    worker = start_worker(runner)
    worker.encode(batch(*(picture(number) for number in range(12))))
    assert runner.max_under_way == 2


def test_work_that_comes_while_a_launch_is_under_way_does_not_wait_for_its_end(start_worker: StartWorker) -> None:
    runner = FakeRunner([graph(cost_ms=1500)])
    worker = start_worker(runner)
    runner.gate.clear()
    results = []
    threads = [
        threading.Thread(
            target=lambda number=number: results.append(worker.encode(batch(picture(number), call_id=str(number))))
        )
        for number in range(2)
    ]
    threads[0].start()
    until(lambda: len(runner.runs) == 1)
    burnt_s = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - burnt_s < 0.1
    threads[1].start()
    until(lambda: len(runner.runs) == 2)
    runner.gate.set()
    opened_s = time.monotonic()
    for thread in threads:
        thread.join(20)
    assert time.monotonic() - opened_s < 0.25
    assert [errors(result) for result in results] == [[None], [None]]


def test_a_saturated_worker_refuses_items_and_answers_while_the_gpu_is_busy(start_worker: StartWorker) -> None:
    runner = FakeRunner([graph(2, cost_ms=60)])
    worker = start_worker(runner, max_queue_ms=100)
    runner.gate.clear()
    result = []
    thread = threading.Thread(target=lambda: result.append(worker.encode(batch(picture(1), picture(2), picture(3)))))
    thread.start()
    until(lambda: worker.report().backlog_ms == 60)
    assert worker.report().state is WorkerState.READY
    runner.gate.set()
    thread.join(20)
    assert errors(result[0]) == [None, "PoolSaturatedError", "PoolSaturatedError"]
    assert "retry in 20 ms" in message(result[0].items[1].error)
    stats = worker.report().stats
    assert (stats.num_items, stats.num_failed) == (1, 0)  # what was refused was never here


def test_cancel_drops_what_is_queued(start_worker: StartWorker, settled: list[int]) -> None:
    runner = FakeRunner([graph(2)])
    worker = start_worker(runner)
    runner.gate.clear()
    result = []
    call = batch(*(picture(number) for number in range(6)))
    thread = threading.Thread(target=lambda: result.append(worker.encode(call)))
    thread.start()
    until(lambda: worker.report().num_waiting >= 4)  # one or two are in flight
    worker.cancel("call")
    thread.join(20)
    assert errors(result[0]) == ["EncodeError"] * 6
    runner.gate.set()
    assert errors(worker.encode(batch(picture(1)))) == [None]
    assert len(runner.runs) <= 3
    assert worker.report().backlog_ms == 0
    assert sorted(settled) == [0, 0, 1, 2, 3, 4, 5]


def test_a_cancel_that_overtakes_its_call_counts(start_worker: StartWorker, settled: list[int]) -> None:
    runner = FakeRunner()
    worker = start_worker(runner)
    worker.cancel("call")
    assert errors(worker.encode(batch(picture(1)))) == ["EncodeError"]
    assert runner.runs == []
    assert settled == [0]
    worker.cancel("another", [1])
    call = batch(picture(1), picture(2), picture(3), call_id="another")
    assert errors(worker.encode(call)) == [None, "EncodeError", None]


def test_an_answered_call_is_counted_and_its_room_free(start_worker: StartWorker, settled: list[int]) -> None:
    worker = start_worker(FakeRunner())
    release = worker._batcher.release

    def release_late(job: Job) -> None:
        time.sleep(0.05)
        release(job)

    worker._batcher.release = release_late  # type: ignore[method-assign]
    worker.encode(batch(picture(1)))
    assert settled == [0]
    assert worker.report().backlog_ms == 0
    assert worker.report().stats.num_items == 1


def test_a_run_under_way_changes_nothing_of_an_answer_that_was_given() -> None:
    """Of an item that was cancelled: its segments may be on the device still."""
    job = Job(cost_ms=1.0)
    job.timings_ms["decode"] = 2.0
    job.fail(EncodeError("its caller cancelled it"))
    result = answer("w", [job], cast(EncoderRunner, FakeRunner()), shared=False)

    class Interrupting(Meter):
        def observe(self, name: str, *labels: str, value: float) -> None:
            job.timings_ms[f"a run ended during {labels}"] = 1.0

    counts = Counts("w")
    counts._meter = Interrupting("w")
    counts.settled(job)
    assert len(job.timings_ms) == 2
    assert result.items[0].timings_ms == {"decode": 2.0}


def test_an_item_past_its_deadline_fails_with_it(start_worker: StartWorker) -> None:
    assert errors(start_worker(FakeRunner()).encode(batch(picture(1), timeout_s=0.0))) == ["DeadlineError"]


def test_a_draining_worker_finishes_what_it_has(start_worker: StartWorker) -> None:
    worker = start_worker(FakeRunner())
    worker.encode(batch(picture(1)))
    assert worker.drain(10)
    assert worker.report().state is WorkerState.DRAINING
    assert errors(worker.encode(batch(picture(1)))) == ["PoolClosedError"]


def test_costs_that_moved_are_reported(start_worker: StartWorker) -> None:
    clock = Clock()
    runner = FakeRunner([graph(cost_ms=10)])
    worker = start_worker(runner, now_s=clock)
    runner.views = [graph(cost_ms=15)]
    worker.encode(batch(picture(1)))
    assert [view.cost_ms for view in worker.report().graphs] == [10]
    clock.now += 6
    until(lambda: [view.cost_ms for view in worker.report().graphs] == [15])


def test_a_report_says_whether_eager_runs_were_measured(start_worker: StartWorker) -> None:
    assert not start_worker(FakeRunner()).report().eager_measured  # the probe picture's one run is a guess
    runner = FakeRunner()
    runner.eager = EagerCost(base_ms=5.0, ms_per_patch=0.1)
    report = start_worker(runner).report()
    assert (report.eager_measured, report.eager_ms_per_patch) == (True, 0.1)


def test_many_callers_get_their_own_results(start_worker: StartWorker, settled: list[int]) -> None:
    worker = start_worker(FakeRunner())
    wrong: list[int] = []

    def call(number: int) -> None:
        result = worker.encode(batch(picture(number, width=250), picture(number + 100), call_id=str(number)))
        if result.tokens_TE[:, 0].tolist() != [number] * 6 + [number + 100] * 2:
            wrong.append(number)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert wrong == []
    assert len(settled) == 24
    assert worker.report().backlog_ms == 0


def test_a_graph_that_cannot_be_captured_is_reported_and_the_others_serve(start_worker: StartWorker) -> None:
    runner = FakeRunner([graph(4)])
    failed = {graph(16).key: "RuntimeError: cannot capture this"}
    runner.capture = lambda: CaptureReport(  # type: ignore[method-assign]
        num_graphs=1, seconds=0.1, num_bytes=0, failed=failed
    )
    worker = start_worker(runner)
    report = worker.report()
    assert (report.state, report.failed_graphs) == (WorkerState.READY, tuple(failed.items()))
    assert worker.encode(batch(picture(1))).items[0].graphs == (str(graph(4).key),)
    stats = PoolStats(num_workers=1, members=(), reports=(report,))
    assert stats.failed_graphs == {str(graph(16).key): "RuntimeError: cannot capture this"}


def test_limits_of_items_do_not_hold_for_the_probe(start_worker: StartWorker) -> None:
    limits = EncoderConfig(model="fake", max_pixels=100, max_bytes=1000)
    worker = start_worker(FakeRunner(), encoder=limits)
    assert worker.report().state is WorkerState.READY
    assert errors(worker.encode(batch(picture(1)))) == ["MediaTooLargeError"]


def test_the_probe_catches_a_worker_that_answers_with_nan(start_worker: StartWorker) -> None:
    runner = FakeRunner()
    runner.finish = lambda launch: [torch.full((2, 4), torch.nan) for _ in launch]  # type: ignore[method-assign]
    worker = start_worker(runner)
    report = worker.report()
    assert report.state is WorkerState.FAILED
    assert report.error is not None
    assert report.error.name == "WorkerStartError"
    assert "not finite" in message(report.error)
    with pytest.raises(WorkerLostError, match="w is failed"):
        worker.encode(batch(picture(1)))
