"""One local Ray for the whole session, and on it a pool of two CPU workers with a small real model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fakes import tiny_config

from cluster import EncoderPool, local_ray


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    own = local_ray.connect(tiny_config(num_workers=4))
    yield
    if own is not None:
        own.shutdown()


@pytest.fixture(scope="session")
def pool(ray_cluster: None) -> Iterator[EncoderPool]:
    with EncoderPool.start(tiny_config()) as pool:
        yield pool
