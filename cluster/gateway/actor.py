"""The gateway of a standing pool in a process of its own: a detached Ray actor that lives and ends with the pool."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.config import PoolConfig
from cluster.gateway.config import GatewayConfig
from cluster.gateway.threaded import GatewayThread
from cluster.lifecycle.actors import NAMESPACE, actor_name, find_actor, parts_of
from cluster.lifecycle.local_ray import NOTICE_DEATHS
from cluster.lifecycle.processes import settle
from encoder.errors import ConfigError, WorkerStartError
from workers.messages import ErrorNote
from workers.process import set_up_process

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
ANSWER_TIMEOUT_S = 5.0
RETRY_S = 10.0  # until the process of a gateway that cannot serve ends, for Ray to start another
PREFIX = "gateway-"  # of the names of their actors, before a number


class UnderWay(NamedTuple):
    """Requests that a gateway has not answered yet, and how long it waits for them when it ends."""

    num_requests: int
    timeout_s: float


class GatewayActor:
    """Serves a standing pool from its start on. Ray starts it again should it die."""

    def __init__(self, pool: str, config: GatewayConfig) -> None:
        """What goes wrong is raised by `url`, to who started it; a while later Ray tries again."""
        set_up_process("encpool-gateway")
        from cluster.pool import EncoderPool

        self._config = config
        self._failure: ErrorNote | None = None
        self._gateway = GatewayThread(None, config)
        try:
            self._gateway.start()
            self._gateway.attach(EncoderPool.connect(pool))
            settle()
        except Exception as error:  # edge of a process: who waits for the start hears of it, and ends the actor
            logger.error("the gateway cannot serve: %s", error)
            self._failure = ErrorNote.of(error, otherwise=WorkerStartError)
            # Of a start that Ray made nobody hears, and without this it would never serve again.
            again = threading.Timer(RETRY_S, os._exit, [1])
            again.daemon = True
            again.start()

    def url(self) -> str:
        """Where it listens. Raises what kept it from serving."""
        if self._failure is not None:
            raise self._failure.to_error()
        return self._gateway.url

    def under_way(self) -> UnderWay:
        """What `drain` would wait for."""
        return UnderWay(self._gateway.num_requests, self._config.drain_timeout_s)

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
    part = f"{PREFIX}{number}"
    options = {
        "name": actor_name(config.name, part),
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "runtime_env": {"env_vars": {name: os.environ.get(name, value) for name, value in NOTICE_DEATHS.items()}},
        "scheduling_strategy": NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False),
    }
    actor_class = remote(num_cpus=config.gateway.num_cpus, max_restarts=-1, max_concurrency=4)(GatewayActor)
    try:
        actor = actor_class.options(**options).remote(config.name, config.gateway)
    except ValueError as error:
        raise ConfigError(f"pool {config.name!r} has a {part} already") from error
    try:
        url: str = ray.get(actor.url.remote(), timeout=START_TIMEOUT_S)
    except BaseException as error:
        ray.kill(actor)
        if isinstance(error, RayActorError):
            raise WorkerStartError(f"the gateway's process could not start: {error}") from error
        raise
    return url


def drain_gateways(pool: str, *, say: Callable[[str], object]) -> None:
    """Let the gateways of a standing pool answer what they have; from now on they refuse what comes.

    Each waits for as long as its `drain_timeout_s` says. One that does not answer is left as it is.
    """
    waits: dict[Any, float] = {}
    for part in parts_of(pool):
        if not part.startswith(PREFIX):
            continue
        with suppress(ValueError, RayError):  # it has gone meanwhile, or hangs
            gateway = find_actor(pool, part)
            under_way: UnderWay = ray.get(gateway.under_way.remote(), timeout=ANSWER_TIMEOUT_S)
            waits[gateway.drain.remote()] = under_way.timeout_s
            if under_way.num_requests:
                say(
                    f"draining {part}: {under_way.num_requests} requests under way, {under_way.timeout_s:g} s at most; "
                    f"Ctrl-C ends it at once"
                )
    if waits:
        done, late = ray.wait(list(waits), num_returns=len(waits), timeout=max(waits.values()) + ANSWER_TIMEOUT_S)
        in_time = 0
        for call in done:
            with suppress(RayError):
                in_time += ray.get(call)
        if in_time < len(done) + len(late):
            say("some requests were not answered in time")
