"""A running pool that follows its traffic: real workers change their graphs while they serve."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from fakes import tiny_config

from cluster import EncoderPool
from cluster.config import PoolConfig
from cluster.planning.fleet import RayFleet, replanning
from cluster.planning.replan_config import ReplanConfig
from cluster.planning.replanner import Replanner
from cluster.streams.outcomes import Outcome
from encoder.media import decode_image
from encoder.runner import EncoderRunner
from encoder.types import GraphKey
from workers.messages import WorkerReport


def until(condition: Callable[[], Any], note: Callable[[], str] = str, timeout_s: float = 60.0) -> Any:
    """What the condition gives once it gives something; `note` says how far things are if that comes too late."""
    limit_s = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < limit_s, f"nothing came of it in {timeout_s:g} s: {note()}"
        time.sleep(0.1)
    return found


@pytest.fixture
def fresh_pool(ray_cluster: None) -> Iterator[EncoderPool]:
    """Workers that nobody has killed and that hold the graphs they began with."""
    with EncoderPool.start(tiny_config()) as pool:
        yield pool


@pytest.mark.timeout(280)
def test_a_pool_captures_what_suits_its_traffic_and_every_answer_stays_right(
    fresh_pool: EncoderPool, save_picture: Callable[..., Path]
) -> None:
    """Both workers hold one graph, eight times too large for the pictures that come."""
    pool = fresh_pool
    fleet = RayFleet(pool.name, pool._router)

    def reports() -> Sequence[WorkerReport]:
        return cast(Sequence[WorkerReport], until(lambda: len(two := fleet.reports() or ()) == 2 and two))

    before = {report.worker_id: tuple(view.key for view in report.graphs) for report in reports()}
    largest = max(before["worker-0"], key=lambda key: key.token_budget)

    def hold(worker_id: str, keys: tuple[GraphKey, ...]) -> None:
        fleet.apply(worker_id, keys)

        def is_done() -> bool:
            report = fleet.report(worker_id)
            change = None if report is None else report.graph_change
            return change is not None and change.wanted == keys and change.done and not change.failed

        until(is_done)

    for worker_id in before:
        hold(worker_id, (largest,))
    pictures = [save_picture(f"{number}.png", 224, 224, seed=number) for number in range(8)]
    stop, outcomes = threading.Event(), list[Outcome]()

    def encode() -> None:
        while not stop.is_set():
            outcomes.extend(pool.encode_many(pictures))

    def changed_both() -> bool:
        replanner.tick()
        return replanner.num_changes == 2

    config = ReplanConfig(interval_s=0.5, min_items=20, change_timeout_s=60)
    encoder = pool.config.worker.encoder
    replanner = Replanner(fleet, pool.client.adapter, encoder, config)
    thread = threading.Thread(target=encode)
    assert fleet.take_trace("recorder") == ()  # from now on
    thread.start()
    try:
        until(changed_both, lambda: replanner.note)
        until(lambda: all(report.cost_error is not None for report in reports()))
    finally:
        stop.set()
        thread.join(60)
    smallest = min(key.token_budget for key in before["worker-0"])
    for report in reports():
        assert {smallest, largest.token_budget} <= {view.key.token_budget for view in report.graphs}
    runner = EncoderRunner.from_config(encoder.model_copy(update={"graphs": False}), "cpu")
    expected = {
        path: torch.cat(runner.encode(runner.adapter.prepare(decode_image(path.read_bytes(), max_pixels=10**8,
                                                                          max_bytes=10**8))))
        for path in pictures
    }  # fmt: skip
    assert len(outcomes) >= 20
    for outcome in outcomes:
        assert outcome.embedding is not None, outcome.error
        torch.testing.assert_close(outcome.embedding.tokens, expected[Path(str(outcome.source))], rtol=1e-5, atol=1e-5)
    traced = fleet.take_trace("recorder")
    assert 0 < len(traced) <= len(outcomes)
    assert {one.grids for one in traced} == {outcome.embedding.shape.grids for outcome in outcomes if outcome.embedding}
    assert all(one.graphs and one.ms > 0 for one in traced)
    traffic = fleet.traffic()
    assert traffic is not None
    assert sum(traffic.counts().values()) == pytest.approx(len(outcomes), rel=0.1)


@pytest.mark.parametrize(("enabled", "number"), [("auto", 0), (True, 1), (False, 0)])
def test_replanning_is_left_to_pools_with_gpus_unless_asked_for(enabled: object, number: int) -> None:
    config = tiny_config(replan={"enabled": enabled})
    assert len(replanning(config, config.worker_groups, "no-pool", None).decisions()) == number


def test_each_model_of_a_pool_with_workers_on_gpus_has_a_replanner() -> None:
    models = {"first": ("tiny-minicpmv-2.6", "cuda"), "second": ("tiny-siglip", "cpu"), "third": ("tiny-clip", "cuda")}
    groups = [
        {"name": name, "num_workers": 1, "worker": {"device": device, "encoder": {"model": model}}}
        for name, (model, device) in models.items()
    ]
    config = PoolConfig.model_validate({"worker": {}, "groups": groups})
    made = replanning(config, config.worker_groups, "no-pool", None)
    assert [one.model for one in made.decisions()] == ["tiny-minicpmv-2.6", "tiny-clip"]


def test_a_share_of_a_gpu_halves_what_its_graphs_may_take_but_no_limit_that_a_worker_has_of_its_own() -> None:
    model, sections = "tiny-minicpmv-2.6", {
        "half": {"device": "cuda"}, "limited": {"device": "cuda", "graph_memory_gib": 4}, "host": {"device": "cpu"},
    }  # fmt: skip
    groups = [
        {"name": name, "num_workers": 1, "gpu_share": 0.5, "worker": {**section, "encoder": {"model": model}}}
        for name, section in sections.items()
    ]
    config = PoolConfig.model_validate({"worker": {}, "groups": groups})
    (planner,) = replanning(config, config.worker_groups, "no-pool", None).replanners
    assert planner.memory_shares == {"half": 0.5}
