"""Several encoders in one pool: each item is encoded by workers of the model that was asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from fakes import tiny_config

from cluster import EncoderPool
from cluster.config import PoolConfig
from cluster.gateway.config import GatewayConfig
from cluster.gateway.threaded import GatewayThread
from cluster.gateway.wire import EncodeOptions
from cluster.http_client import HttpClient
from cluster.planning.fleet import RayFleet
from cluster.planning.histogram import TrafficHistogram
from encoder.errors import ConfigError
from encoder.media import decode_image
from encoder.runner import EncoderRunner

MODELS = ("tiny-minicpmv-2.6", "tiny-minicpmv-2.5", "tiny-siglip")


@pytest.fixture(scope="module")
def models_pool(ray_cluster: None) -> Iterator[EncoderPool]:
    worker = {"device": "cpu", "report_interval_s": 0.2, "torch_threads": 1}
    groups = [
        {"name": f"group_{number}", "num_workers": 1, "worker": {"encoder": {"model": model}}}
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
        assert TrafficHistogram.from_bytes(traffic.histogram).counts().keys() == kinds


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
