"""One local Ray of the whole session, to which tests may add nodes, and on it a pool of two small CPU workers."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator

import pytest
import ray
from fakes import tiny_config
from ray.cluster_utils import Cluster

from cluster import EncoderPool
from cluster.lifecycle.local_ray import NOTICE_DEATHS

NOTICE_SOON = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 10_000,  # who is dead refuses at once; who is slow on a busy machine is not dead
    "health_check_failure_threshold": 3,
}


@pytest.fixture(scope="session")
def nodes() -> Iterator[Cluster]:
    """A head with four CPUs, by whatever number of cores; a node that dies is noticed within seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", os.environ.get("RAY_AUTH_MODE", "disabled"))
        head = {"num_cpus": 4, "num_gpus": 0, "include_dashboard": False, "_system_config": NOTICE_SOON}
        nodes = Cluster(initialize_head=True, head_node_args=head)
        with pytest.MonkeyPatch.context() as settings:
            for name, value in NOTICE_DEATHS.items():  # as a pool that connects by itself
                settings.setenv(name, value)
            ray.init(address=nodes.address, namespace="encpool", logging_level=logging.WARNING)
        yield nodes
        ray.shutdown()
        nodes.shutdown()


@pytest.fixture(scope="session")
def ray_cluster(nodes: Cluster) -> None:
    """For tests that need Ray and add no nodes."""


@pytest.fixture(scope="session")
def pool(ray_cluster: None) -> Iterator[EncoderPool]:
    with EncoderPool.start(tiny_config()) as pool:
        yield pool


@pytest.fixture
def whole_pool(pool: EncoderPool) -> EncoderPool:
    """The same, once the workers that tests have killed are back."""
    limit_s = time.monotonic() + 60
    while pool.stats().num_ready < pool.config.num_workers:
        assert time.monotonic() < limit_s, "the worker did not come back"
        time.sleep(0.1)
    return pool
