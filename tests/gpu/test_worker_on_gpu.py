"""A worker and a pool on a real GPU, against a plain runner on the same device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from fakes import tiny_config

from cluster import EncoderPool
from encoder.config import EncoderConfig
from encoder.errors import BadMediaError, WorkerStartError
from encoder.media import decode_image, probe_header
from encoder.runner import EncoderRunner
from workers.config import WorkerConfig
from workers.messages import EncodeBatch, EncodeItem, WorkerState
from workers.worker import EncoderWorker

pytestmark = pytest.mark.gpu

ENCODER = EncoderConfig(model="tiny-minicpmv-2.6", dtype="bfloat16")
SIZES = [(640, 480), (224, 224), (100, 700), (1000, 300), (1280, 720), (90, 40)]
SavePicture = Callable[..., Path]


@pytest.fixture
def pictures(save_picture: SavePicture) -> list[bytes]:
    return [
        save_picture(f"{number}.png", *SIZES[number % len(SIZES)], seed=number).read_bytes() for number in range(18)
    ]


@pytest.fixture
def expected(pictures: list[bytes]) -> list[torch.Tensor]:
    runner = EncoderRunner.from_config(ENCODER.model_copy(update={"graphs": False}), "cuda:0")
    images = [decode_image(data, max_pixels=10**8, max_bytes=10**8) for data in pictures]
    return [torch.cat(runner.encode(runner.adapter.prepare(image))) for image in images]


def test_a_worker_on_a_gpu_answers_as_the_runner_does(pictures: list[bytes], expected: list[torch.Tensor]) -> None:
    worker = EncoderWorker(WorkerConfig(encoder=ENCODER, device="cuda", max_queue_ms=1e6), "w")
    worker.start()
    try:
        assert worker.wait_started(120) is WorkerState.READY, worker.report().error
        report = worker.report()
        assert report.gpu_uuid
        assert report.graphs
        assert worker._gpu is not None
        adapter = worker._gpu.runner.adapter
        items = tuple(
            EncodeItem(
                lease_id=number,
                encoded=np.frombuffer(data, np.uint8),
                shape=adapter.probe(probe_header(data, max_pixels=10**8, max_bytes=10**8)),
            )
            for number, data in enumerate(pictures)
        )
        result = worker.encode(EncodeBatch(call_id="call", items=items))
    finally:
        worker.close()
    assert result.dtype == "bfloat16"
    tokens_TE = torch.from_numpy(result.tokens_TE).view(torch.bfloat16)
    for number, reference in enumerate(expected):
        assert result.items[number].error is None
        assert result.items[number].graphs
        own = tokens_TE[result.offsets[number] : result.offsets[number + 1]]
        torch.testing.assert_close(own.float(), reference.float(), rtol=2e-2, atol=2e-2)


def test_a_pool_on_one_gpu_encodes_and_refuses_a_second_worker(
    pictures: list[bytes], expected: list[torch.Tensor]
) -> None:
    worker = {"device": "auto", "encoder": ENCODER}
    with EncoderPool.start(tiny_config(num_workers=1, worker=worker)) as pool:
        outcomes = list(pool.encode_many([*pictures, b"no picture"]))
        (member,) = pool.members()
        assert member.gpu_uuid
        with pytest.raises(WorkerStartError, match="workers need a GPU each"):
            EncoderPool.start(
                tiny_config(num_workers=torch.cuda.device_count() + 1, worker=worker | {"device": "cuda"})
            )
    assert isinstance(outcomes.pop().error, BadMediaError)
    for outcome, reference in zip(outcomes, expected, strict=True):
        assert outcome.embedding is not None, outcome.error
        assert outcome.embedding.tokens.dtype == torch.bfloat16
        torch.testing.assert_close(outcome.embedding.tokens.float(), reference.float(), rtol=2e-2, atol=2e-2)
