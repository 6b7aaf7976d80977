"""`encpool serve`: a gateway in the foreground, with a pool of its own or one that runs already."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress

from cluster.gateway.config import GatewayConfig
from cluster.gateway.threaded import GatewayThread
from cluster.lifecycle.processes import settle
from cluster.notices import say
from cluster.pool import EncoderPool
from encoder.errors import WorkerLostError
from workers import spans

LOOK_S = 5.0


def serve(open_pool: Callable[[], AbstractContextManager[EncoderPool]], config: GatewayConfig) -> None:
    """Serve until SIGINT or SIGTERM, then drain; a second signal ends it at once.

    Raises ConfigError when the address or the tokens file cannot be used, what opening the pool raises, and
    PoolClosedError when somebody else has ended the pool.
    """
    spans.set_up("encpool-gateway")
    with GatewayThread(None, config) as gateway:  # it says 503 while the pool starts
        say(f"listening on {gateway.url}, the pool is starting")
        with open_pool() as pool:
            gateway.attach(pool)
            settle()
            with _signals() as stop:
                print(f"serving {', '.join(pool.config.encoders)} on {gateway.url}", flush=True)
                if config.tokens_file is None and config.host not in ("127.0.0.1", "localhost", "::1"):
                    say("everybody who reaches this address may use it; set gateway.tokens_file")
                while not stop.wait(LOOK_S):
                    with suppress(WorkerLostError):  # its router restarts
                        pool.members()
            say(f"draining: {gateway.num_requests} requests under way; once more ends it at once")
            if not gateway.drain():
                say(f"{gateway.num_requests} requests were not answered in time")
            gateway.stop()


@contextmanager
def _signals() -> Iterator[threading.Event]:
    """An event that SIGINT and SIGTERM set. Ray, once started, would answer SIGTERM with an abort."""
    stop = threading.Event()
    before = [(number, signal.signal(number, lambda *_: stop.set())) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        yield stop
    finally:
        for number, handler in before:
            signal.signal(number, signal.default_int_handler if number is signal.SIGTERM else handler)
