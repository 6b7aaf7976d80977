"""Reaching Ray: the cluster that is there, or a local one that ends with the pool."""

from __future__ import annotations

import logging
import math
import os
import secrets

import ray

from cluster.config import PoolConfig

logger = logging.getLogger(__name__)


_TOKEN = secrets.token_hex(32)  # one a process: Ray keeps the first that it sees


class OwnRay:
    """A connection that this process made, and must end."""

    def __init__(self, restore: dict[str, str | None]) -> None:
        """`restore`: environment variables as they were before."""
        self._restore = restore

    def shutdown(self) -> None:
        """End the connection, and with it a local cluster."""
        ray.shutdown()
        for name, value in self._restore.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def connect(config: PoolConfig) -> OwnRay | None:
    """Connect to Ray unless this process is connected; None when it is, and the connection is somebody else's."""
    if ray.is_initialized():
        return None
    address = config.ray_address or os.environ.get("RAY_ADDRESS")
    if address:  # its authentication is the user's affair
        ray.init(address=address, namespace="encpool", logging_level=logging.WARNING)
        return OwnRay({})
    restore = {name: os.environ.get(name) for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN")}
    if not any(restore.values()) and "RAY_AUTH_TOKEN_PATH" not in os.environ:
        # A local cluster authenticates by token unless RAY_AUTH_MODE says otherwise. Without one at hand Ray would
        # save one in the home directory; ours keeps other users of the machine out as well and leaves nothing behind.
        os.environ["RAY_AUTH_TOKEN"] = _TOKEN
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)  # it announces the token at each start
    num_cpus = math.ceil(config.num_workers * config.cpus_per_worker)
    try:
        ray.init(
            address="local",
            namespace="encpool",
            num_cpus=max(os.cpu_count() or 1, num_cpus),  # more workers than cores share them
            include_dashboard=False,
            logging_level=logging.WARNING,
        )
    except BaseException:
        OwnRay(restore).shutdown()
        raise
    return OwnRay(restore)
