"""Reaching Ray: the cluster that is there, a head of our own, or a local one that ends with the pool."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import ray

from cluster.config import PoolConfig
from cluster.interrupts import keeping_sigterm
from cluster.lifecycle.entrypoint import readable_entrypoint
from cluster.lifecycle.head import running_head
from cluster.lifecycle.nodes import cpus_for
from encoder.errors import WorkerStartError

logger = logging.getLogger(__name__)


_TOKEN = secrets.token_hex(32)  # one a process: Ray keeps the first that it sees


class OwnRay:
    """A connection that this process made. Its users share it, each in a `with` or until its `shutdown`; the last to
    leave ends it."""

    def __init__(self, restore: dict[str, str | None]) -> None:
        """`restore`: environment variables as they were before."""
        self._restore = restore
        self._num_users = 0

    def join(self) -> OwnRay:
        """Count one user more."""
        global _own
        _own = self
        self._num_users += 1
        return self

    def shutdown(self) -> None:
        """One user less; without any, end the connection, and with it a local cluster."""
        global _own
        with _lock:
            self._num_users -= 1
            if self._num_users > 0:
                return
            _own = None
            self.end()

    def __enter__(self) -> OwnRay:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def end(self) -> None:
        """Disconnect, whoever uses it."""
        ray.shutdown()
        for name, value in self._restore.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


CONNECT_TIMEOUT_S = 5.0

NOTICE_DEATHS = {
    "RAY_timeout_ms_task_wait_for_death_info": "50",
    "RAY_core_worker_internal_heartbeat_ms": "100",
}
"""With Ray's own settings (1000 ms both) the calls to an actor that was killed and restarts fail after 1.0 to 1.6 s:
it waits to learn more of the death, and looks once a second. With these they fail after 0.10 to 0.15 s (measured on two
busy cores). They hold for processes that connect through us, and for the gateway of a standing pool."""

END_TOGETHER = {"RAY_gcs_rpc_server_reconnect_timeout_s": "10"}
"""For a local cluster: where a signal to all of its processes ended the first one, the others wait no minute for it."""

_lock = threading.Lock()  # Ray has one connection a process, and starts or ends it in one thread
_own: OwnRay | None = None


def connect(config: PoolConfig) -> OwnRay | None:
    """Connect to Ray unless this process is connected; None when it is, and the connection is somebody else's.

    Raises WorkerStartError when Ray does not answer, or does not start.
    """
    with _lock:
        if ray.is_initialized():
            return None if _own is None else _own.join()
        with _settings(NOTICE_DEATHS):
            return _connect(config).join()


@contextmanager
def _settings(settings: Mapping[str, str]) -> Iterator[None]:
    """Environment variables that Ray reads when it starts; those that the user has set stay."""
    ours = {name: value for name, value in settings.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


def attach(address: str | None = None, *, show_logs: bool = False) -> OwnRay | None:
    """Connect to a cluster that is there; None when this process is connected, by somebody else.

    `show_logs` prints what actors log to our stderr: of a pool that others use as well, it is not our affair.

    The cluster is the one this process is connected to, else the one at `address`, or that RAY_ADDRESS names, or the
    one that `encpool up` has started on this machine. None is looked for: Ray would find anybody's.

    Raises WorkerStartError when none of them is there.
    """
    with _lock:
        if ray.is_initialized():
            return None if _own is None else _own.join()
        address = address or os.environ.get("RAY_ADDRESS")
        if not address:
            head = running_head()
            if head is None:
                raise WorkerStartError(
                    "no Ray cluster is named, and none was started by `encpool up` on this machine; "
                    "set RAY_ADDRESS, or start a pool with `encpool up --config FILE`"
                )
            address = head.address
        with _settings(NOTICE_DEATHS):
            return _attach(address, show_logs=show_logs).join()


def is_attached(address: str) -> bool:
    """Whether this process is connected to the cluster at this address."""
    port = address.rpartition(":")[2]
    return ray.is_initialized() and ray.get_runtime_context().gcs_address.rpartition(":")[2] == port


def _attach(address: str, *, show_logs: bool) -> OwnRay:
    restore: dict[str, str | None] = {}
    head = running_head()
    if head is not None and head.address == address:
        restore = {name: os.environ.get(name) for name in head.environment}
        os.environ.update(head.environment)
        _read_authentication_anew()  # that of other clusters is the user's affair
    try:
        _reach(address)
        with keeping_sigterm(), readable_entrypoint():
            ray.init(address=address, namespace="encpool", logging_level=logging.WARNING, log_to_driver=show_logs)
    except BaseException as error:
        OwnRay(restore).end()
        if isinstance(error, ValueError | RuntimeError | OSError):
            raise WorkerStartError(f"no Ray cluster at {address!r}: {error}; start one, or leave it out") from error
        raise
    return OwnRay(restore)


def _read_authentication_anew() -> None:
    """Ray reads the mode when it is imported and the token when it first needs one, and offers no way to look again.

    `ray.init` does the same when it turns authentication on by itself.
    """
    from ray import _raylet

    config, tokens = getattr(_raylet, "Config", None), getattr(_raylet, "AuthenticationTokenLoader", None)
    if config is not None and tokens is not None:  # older versions have no authentication
        config.initialize("")
        tokens.instance().reset_cache()


def _connect(config: PoolConfig) -> OwnRay:
    address = config.ray_address or os.environ.get("RAY_ADDRESS")
    if address:
        return _attach(address, show_logs=True)
    restore = {name: os.environ.get(name) for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN")}
    if not any(restore.values()) and "RAY_AUTH_TOKEN_PATH" not in os.environ:
        # A local cluster authenticates by token unless RAY_AUTH_MODE says otherwise. Without one at hand Ray would
        # save one in the home directory; ours keeps other users of the machine out as well and leaves nothing behind.
        os.environ["RAY_AUTH_TOKEN"] = _TOKEN
        _read_authentication_anew()
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)  # it announces the token at each start
    try:
        with keeping_sigterm(), readable_entrypoint(), _settings(END_TOGETHER):
            ray.init(
                address="local",
                namespace="encpool",
                num_cpus=cpus_for(config.worker_groups),
                include_dashboard=False,
                logging_level=logging.WARNING,
            )
    except BaseException:
        OwnRay(restore).end()
        raise
    return OwnRay(restore)


def _reach(address: str) -> None:
    """Raises OSError when nobody listens at `host:port`: Ray itself would try for many minutes."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or "/" in host:
        return  # "auto", a local cluster's address file, Ray's client protocol
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
    except OverflowError as error:
        raise OSError(str(error)) from error
