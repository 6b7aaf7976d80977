"""A gateway before a pool of two CPU workers with a small real model."""

from __future__ import annotations

from collections.abc import Iterator
from io import BytesIO

import pytest
from fakes import tiny_config
from http_calls import Caller

from cluster import EncoderPool
from cluster.gateway.config import GatewayConfig
from cluster.gateway.threaded import GatewayThread
from encoder.pictures import draw_picture


@pytest.fixture(scope="session")
def pool() -> Iterator[EncoderPool]:
    with EncoderPool.start(tiny_config(cpus_per_worker=0.1)) as pool:  # beside the pools of other tests
        yield pool


@pytest.fixture(scope="session")
def gateway(pool: EncoderPool) -> Iterator[GatewayThread]:
    with GatewayThread(pool, GatewayConfig(port=0)) as gateway:
        yield gateway


@pytest.fixture
def caller(gateway: GatewayThread) -> Iterator[Caller]:
    with Caller(gateway.url) as caller:
        yield caller


@pytest.fixture(scope="session")
def pictures() -> list[bytes]:
    """Small pictures of several sizes and formats."""
    found = []
    for number, (width, height, kind) in enumerate(
        [(64, 48, "PNG"), (90, 40, "JPEG"), (30, 80, "WEBP"), (120, 120, "PNG"), (200, 90, "JPEG"), (48, 64, "PNG")]
    ):
        file = BytesIO()
        draw_picture(width, height, number).save(file, kind)
        found.append(file.getvalue())
    return found
