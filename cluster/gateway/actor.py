"""The gateway of a standing pool in a process of its own: a detached Ray actor that lives and ends with the pool."""

from __future__ import annotations

import logging
import os
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.config import PoolConfig
from cluster.gateway.config import GatewayConfig
from cluster.gateway.threaded import GatewayThread
from cluster.lifecycle.local_ray import NOTICE_DEATHS
from cluster.lifecycle.roster import NAMESPACE, actor_name
from encoder.errors import ConfigError, WorkerStartError
from workers.messages import ErrorNote

START_TIMEOUT_S = 120.0


class GatewayActor:
    """Serves a standing pool from its start on. Ray starts it again should it die."""

    def __init__(self, pool: str, config: GatewayConfig) -> None:
        """What goes wrong is raised by `url`."""
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # Ray leaves all of them visible to an actor that asked for none
        level = os.environ.get("ENCPOOL_LOG_LEVEL", "WARNING").upper()
        logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s")
        from cluster.pool import EncoderPool

        self._failure: ErrorNote | None = None
        self._gateway = GatewayThread(None, config)
        try:
            self._gateway.start()
            self._gateway.attach(EncoderPool.connect(pool))
        except Exception as error:  # edge of a process: who waits for the start hears of it
            self._failure = ErrorNote.of(error, otherwise=WorkerStartError)

    def url(self) -> str:
        """Where it listens. Raises what kept it from serving."""
        if self._failure is not None:
            raise self._failure.to_error()
        return self._gateway.url

    def drain(self) -> bool:
        """Refuse new requests and wait for those under way; whether all were answered in time."""
        return self._gateway.drain()


def raise_gateway(config: PoolConfig, number: int = 0) -> str:
    """Start a gateway of a standing pool on this node, and return its URL once it serves.

    Several gateways, by number, may share a pool; each needs a port of its own. `encpool down` ends them with it.

    Raises:
        ConfigError: it runs already, or the address or the tokens file cannot be used.
        WorkerStartError: its process could not start.
    """
    remote: Any = ray.remote  # its type hints lack some options
    name = f"gateway-{number}"
    options = {
        "name": actor_name(config.name, name),
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "runtime_env": {"env_vars": {name: os.environ.get(name, value) for name, value in NOTICE_DEATHS.items()}},
        "scheduling_strategy": NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False),
    }
    actor_class = remote(num_cpus=config.gateway.num_cpus, max_restarts=-1, max_concurrency=4)(GatewayActor)
    try:
        actor = actor_class.options(**options).remote(config.name, config.gateway)
    except ValueError as error:
        raise ConfigError(f"pool {config.name!r} has a {name} already") from error
    try:
        url: str = ray.get(actor.url.remote(), timeout=START_TIMEOUT_S)
    except BaseException as error:
        ray.kill(actor)
        if isinstance(error, RayActorError):
            raise WorkerStartError(f"the gateway's process could not start: {error}") from error
        raise
    return url
