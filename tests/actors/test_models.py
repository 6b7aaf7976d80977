"""Several encoders in one pool: each item is encoded by workers of the model that was asked for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from background import Background
from fakes import tiny_config

from cluster import EncoderPool
from cluster.client import Embedding
from cluster.config import PoolConfig
from cluster.gateway.config import GatewayConfig
from cluster.gateway.threaded import GatewayThread
from cluster.gateway.wire import EncodeOptions
from cluster.http_client import HttpClient
from cluster.planning.fleet import RayFleet, replanning
from cluster.planning.replan_config import ReplanConfig
from encoder.errors import ConfigError
from encoder.media import decode_image
from encoder.runner import EncoderRunner
from encoder.types import GraphKey
from workers.messages import WorkerReport

MODELS = ("tiny-minicpmv-2.6", "tiny-minicpmv-2.5", "tiny-siglip")
BUDGETS = {"tiny-siglip": [25, 1600]}  # one picture and 64: with fewer a replay takes as long as with one
SHARE_GIB = 0.125


@pytest.fixture(scope="module")
def models_pool(ray_cluster: None) -> Iterator[EncoderPool]:
    """One worker a model, each with its share of the memory that they have together for graphs."""
    worker = {"device": "cpu", "report_interval_s": 0.2, "torch_threads": 1, "graph_memory_gib": SHARE_GIB}
    groups = [
        {
            "name": f"group_{number}",
            "num_workers": 1,
            "worker": {"encoder": {"model": model, "token_budgets": BUDGETS.get(model)}},
        }
        for number, model in enumerate(MODELS)
    ]
    common = {"cpus_per_worker": 0.3, "start_timeout_s": 150, "items_per_call": 4}
    with EncoderPool.start(PoolConfig.model_validate({"worker": worker, "groups": groups, **common})) as pool:
        yield pool


def test_each_item_gets_the_tokens_of_the_model_asked_for(
    models_pool: EncoderPool, save_picture: Callable[..., Path]
) -> None:
    pictures = [save_picture(f"{number}.png", 60 + 10 * number, 48, seed=number) for number in range(6)]
    streams = {model: models_pool.encode_many(pictures, model=model) for model in MODELS}
    outcomes = {model: [next(stream) for _ in pictures] for model, stream in streams.items()}
    for number, (model, ended) in enumerate(outcomes.items()):
        config = tiny_config(model=model).worker.encoder.model_copy(update={"graphs": False})
        runner = EncoderRunner.from_config(config, "cpu")
        for path, outcome in zip(pictures, ended, strict=True):
            assert outcome.embedding is not None, outcome.error
            assert outcome.embedding.worker == f"group_{number}-0"
            image = decode_image(path.read_bytes(), max_pixels=10**6, max_bytes=10**6)
            expected = torch.cat(runner.encode(runner.adapter.prepare(image)))
            torch.testing.assert_close(outcome.embedding.tokens, expected, rtol=1e-4, atol=1e-5)
    one = models_pool.encode(pictures[0], model=MODELS[1])
    assert one.tokens.shape == outcomes[MODELS[1]][0].embedding.tokens.shape  # type: ignore[union-attr]
    assert {member.model for member in models_pool.members()} == set(MODELS)
    for number, model in enumerate(MODELS):
        fleet = RayFleet(models_pool.name, models_pool._router, model)
        assert [report.worker_id for report in fleet.reports() or ()] == [f"group_{number}-0"]
        traffic = fleet.traffic()
        assert traffic is not None
        kinds = {outcome.embedding.shape.grids for outcome in outcomes[model] if outcome.embedding is not None}
        assert traffic.counts().keys() == kinds


def test_a_model_must_be_named_and_known(models_pool: EncoderPool) -> None:
    with pytest.raises(ConfigError, match=r"it has several models; choose one of tiny-minicpmv-2\.6, "):
        models_pool.encode(b"picture")
    with pytest.raises(ConfigError, match=r"no model 'tiny-clip' in this pool; choose one of"):
        models_pool.encode(b"picture", model="tiny-clip")


def test_a_gateway_serves_every_model(models_pool: EncoderPool, save_picture: Callable[..., Path]) -> None:
    picture = save_picture("a.png")
    with GatewayThread(models_pool, GatewayConfig(port=0)) as gateway:
        for model in MODELS:
            with HttpClient(gateway.url, options=EncodeOptions(model=model)) as client:
                assert [entry["id"] for entry in client.models()] == list(MODELS)
                tokens = client.encode(picture).torch()
            torch.testing.assert_close(tokens, models_pool.encode(picture, model=model).tokens, rtol=1e-4, atol=1e-5)


class Load(Background):
    """Encodes a model's pictures one at a time, over and over, while it is in a `with` block."""

    def __init__(self, pool: EncoderPool, model: str, pictures: list[Path]) -> None:
        super().__init__()
        self._pool, self._model, self._pictures = pool, model, pictures
        self.submitted_s = 0.0  # when the latest one was
        self.ended: list[tuple[Path, Embedding]] = []

    def run(self) -> None:
        while not self.end.is_set():
            for path in self._pictures:
                self.submitted_s = time.monotonic()
                self.ended.append((path, self._pool.encode(path, model=self._model)))


def until(condition: Callable[[], Any], note: Callable[[], object]) -> Any:
    """What the condition gives once it gives something; `note` says how far things are if that comes too late."""
    limit_s = time.monotonic() + 30
    while not (found := condition()):
        assert time.monotonic() < limit_s, note()
        time.sleep(0.02)
    return found


def report_of(pool: EncoderPool, model: str) -> WorkerReport:
    (report,) = until(
        RayFleet(pool.name, pool._router, model).reports, lambda: f"the worker of {model} does not report"
    )
    return report  # type: ignore[no-any-return]


def keys_of(report: WorkerReport) -> set[GraphKey]:
    return {view.key for view in report.graphs}


def hold_largest(pool: EncoderPool, model: str) -> None:
    """Let the worker of a model keep its largest graph alone."""
    report = report_of(pool, model)
    largest = max(keys_of(report), key=lambda key: key.token_budget)
    RayFleet(pool.name, pool._router, model).apply(report.worker_id, (largest,))
    until(lambda: keys_of(report_of(pool, model)) == {largest}, lambda: report_of(pool, model).graph_change)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("changing", [MODELS[0], MODELS[2]])
def test_a_plan_changes_the_graphs_of_the_model_whose_traffic_asks_for_it_and_of_no_other(
    models_pool: EncoderPool, save_picture: Callable[..., Path], changing: str
) -> None:
    """One model's worker holds a graph far too large for what comes, the others' hold what they need."""
    pool = models_pool
    hold_largest(pool, changing)
    before = {model: report_of(pool, model) for model in MODELS}
    pictures = [save_picture(f"{number}.png", 60 + 10 * number, 48, seed=number) for number in range(4)]
    expected = {model: {path: pool.encode(path, model=model).tokens for path in pictures} for model in MODELS}
    follow = {"enabled": True, "interval_s": 0.3, "min_items": 20, "min_gain": 0.3}
    config = pool.config.model_copy(update={"replan": ReplanConfig.model_validate(follow)})
    plans = replanning(config, config.worker_groups, pool.name, pool._router)
    planner = next(one for one in plans.replanners if one.decision().model == changing)

    def tick_until(is_so: Callable[[], bool]) -> None:
        def tick() -> bool:
            plans.tick()
            return is_so()

        until(tick, plans.decisions)

    def have_rested() -> bool:
        return all(one.note.startswith(("kept", "too few", "changed")) for one in plans.decisions())

    with Load(pool, MODELS[0], pictures) as one, Load(pool, MODELS[2], pictures) as other:
        tick_until(lambda: planner.is_changing)
        plans.tick()  # the worker is told, and begins
        begun_s = time.monotonic()
        until(lambda: min(one.submitted_s, other.submitted_s) > begun_s, plans.decisions)
        tick_until(lambda: planner.num_changes == 1)
        tick_until(have_rested)
    for load, model in ((one, MODELS[0]), (other, MODELS[2])):
        for path, embedding in load.ended:
            torch.testing.assert_close(embedding.tokens, expected[model][path], rtol=1e-5, atol=1e-5)
    assert {decision.model for decision in plans.decisions() if decision.num_changes} == {changing}
    for model in MODELS:
        was, now = before[model], report_of(pool, model)
        assert now.incarnation == was.incarnation
        assert now.graph_bytes <= now.graph_limit_bytes == SHARE_GIB * 2**30
        if model == changing:
            smallest = min(keys_of(now) - keys_of(was), key=lambda key: key.token_budget)
            after = pool.encode(pictures[0], model=model)
            assert (smallest.token_budget, (str(smallest),)) == (after.shape.num_tokens, after.graphs)
        else:
            assert (keys_of(now), now.graph_change) == (keys_of(was), was.graph_change)
