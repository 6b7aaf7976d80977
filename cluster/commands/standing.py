"""`encpool up`, `status`, `top`, `scale`, `drain` and `down`: pools that live on without a program of their own."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.commands.arguments import FAILED, OK, add_pool, positive_number
from cluster.notices import say
from encoder.errors import ConfigError, WorkerStartError

if TYPE_CHECKING:
    from cluster.commands.arguments import Commands
    from cluster.config import PoolConfig
    from cluster.lifecycle.head import Head
    from cluster.lifecycle.status import PoolStatus
    from cluster.pool import EncoderPool


def add(commands: Commands) -> None:
    """Declare the commands."""
    up = commands.add_parser(
        "up",
        help="raise a pool that stays until `encpool down`",
        description="Start a pool as detached actors and leave it running. It runs on the Ray cluster that the "
        "configuration or RAY_ADDRESS names; without one a head is started on this machine, for this user alone, "
        "and the last `encpool down` ends it.",
    )
    up.add_argument("--config", type=Path, required=True, metavar="FILE", help="the pool's YAML configuration")
    up.add_argument("--name", "--pool", metavar="NAME", help="what to call it (default: `name` in FILE, or default)")
    up.add_argument("--serve", action="store_true", help="with an HTTP gateway on this node, as `gateway` in FILE says")
    up.set_defaults(run=run_up)

    status = commands.add_parser("status", help="how a pool's workers stand")
    add_pool(status)
    status.add_argument("--json", action="store_true", help="for programs")
    status.set_defaults(run=run_status)

    top = commands.add_parser("top", help="the same, refreshed until Ctrl-C; once where the output is no terminal")
    add_pool(top)
    top.add_argument("--every", type=positive_number, default=1.0, metavar="S", help="seconds (default: %(default)g)")
    top.set_defaults(run=run_top)

    scale = commands.add_parser("scale", help="change the number of workers; who leaves finishes what it has")
    scale.add_argument("num_workers", type=_whole, metavar="N")
    add_pool(scale, positional=False)
    scale.add_argument("--group", metavar="GROUP", help="whose number, in a pool of several groups")
    scale.set_defaults(run=run_scale)

    drain = commands.add_parser("drain", help="take one worker away once it has finished what it has")
    drain.add_argument("worker", metavar="WORKER", help="as `encpool status` calls it")
    add_pool(drain, positional=False)
    drain.add_argument("--replace", action="store_true", help="start another one instead")
    drain.set_defaults(run=run_drain)

    down = commands.add_parser(
        "down",
        help="end a pool once its gateways have answered what they have; with the last one ends our Ray head",
    )
    add_pool(down)
    down.set_defaults(run=run_down)


def run_up(parsed: argparse.Namespace) -> int:
    """Raise a pool."""
    from cluster.config import load_config, parse_config

    config = load_config(parsed.config)
    if parsed.name is not None:
        config = parse_config({**config.model_dump(), "name": parsed.name}, source="up")

    from cluster.lifecycle.head import raising_pool, running_head, start_head, stop_unused
    from cluster.lifecycle.nodes import cpus_for

    address = config.ray_address or os.environ.get("RAY_ADDRESS")
    started = _Started()
    try:
        with raising_pool():
            if not address and running_head() is None:
                started.head = start_head(cpus_for(config.worker_groups), say=say)
            status, url = _raise(config, address, serve=parsed.serve, started=started)
    except BaseException:
        if started.head is not None and started.unused:
            stop_unused(started.head)
        raise
    print(f"pool {config.name!r} is up with {status.num_ready} workers; `encpool down {config.name}` ends it")
    if url is not None:
        print(f"serving {', '.join(config.encoders)} on {url}")
    return OK


@dataclass(slots=True)
class _Started:
    """What `up` has to take back when it fails."""

    head: Head | None = None
    unused: bool = True  # no pool of anybody is on it


def _raise(config: PoolConfig, address: str | None, *, serve: bool, started: _Started) -> tuple[PoolStatus, str | None]:
    """The pool, and its gateway's URL if it shall have one."""
    from cluster.lifecycle import local_ray
    from cluster.lifecycle.actors import pools_here
    from cluster.lifecycle.standing import raise_pool

    with local_ray.attach(address, show_logs=True) or nullcontext():
        try:
            say(f"starting {config.num_workers} workers with {', '.join(config.encoders)} ...")
            return raise_pool(config, watch=_Progress()), _raise_gateway(config) if serve else None
        except BaseException:
            started.unused = not pools_here()
            raise


def _raise_gateway(config: PoolConfig) -> str:
    """Its URL. Without a gateway there shall be no pool either."""
    from cluster.gateway.actor import raise_gateway
    from cluster.lifecycle.standing import end_pool

    try:
        return raise_gateway(config)
    except BaseException:
        end_pool(config.name)
        raise


class _Progress:
    """Says each time that one more worker is ready."""

    def __init__(self) -> None:
        self._num_ready = 0

    def __call__(self, status: PoolStatus) -> None:
        if status.num_ready > self._num_ready:
            self._num_ready = status.num_ready
            say(f"{status.num_ready} of {sum(status.targets.values())} workers ready")


def run_status(parsed: argparse.Namespace) -> int:
    """Print how a pool stands."""
    from cluster.lifecycle.status_table import status_json, status_table

    with connected(parsed.pool) as pool:
        status, stats = pool.status(), pool.stats()
    if parsed.json:
        print(json.dumps(status_json(status, stats), indent=2))
    else:
        print(status_table(status, stats))
    return FAILED if status.failure is not None else OK


def run_top(parsed: argparse.Namespace) -> int:
    """Show how a pool stands, again and again."""
    from cluster.lifecycle.top import watch_pool

    with connected(parsed.pool) as pool:
        watch_pool(pool, every_s=parsed.every)
    return OK


def run_scale(parsed: argparse.Namespace) -> int:
    """Change the number of workers."""
    with connected(parsed.pool) as pool:
        whose = f"group {parsed.group} of pool" if parsed.group else "pool"
        say(f"scaling {whose} {pool.name!r} to {parsed.num_workers} workers ...")
        pool.scale(parsed.num_workers, parsed.group)
        workers = _workers_of(pool)
    print(f"pool {pool.name!r} has {workers}")
    return OK


def run_drain(parsed: argparse.Namespace) -> int:
    """Take a worker away."""
    with connected(parsed.pool) as pool:
        pool.drain(parsed.worker, replace=parsed.replace)
        workers = _workers_of(pool)
    print(f"{parsed.worker} has left; pool {pool.name!r} has {workers}")
    return OK


def _workers_of(pool: EncoderPool) -> str:
    return ", ".join(worker.worker_id for worker in pool.status().workers) or "no workers"


def run_down(parsed: argparse.Namespace) -> int:
    """End a pool, and our head with the last one."""
    from cluster.gateway.actor import drain_gateways
    from cluster.lifecycle import local_ray
    from cluster.lifecycle.actors import pools_here
    from cluster.lifecycle.head import running_head, stop_abandoned, stop_unused
    from cluster.lifecycle.standing import end_pool

    if stop_abandoned():
        print("a Ray head whose start was cut off has ended")
        if parsed.pool is None and not os.environ.get("RAY_ADDRESS") and running_head() is None:
            return OK
    with local_ray.attach() or nullcontext():
        head = running_head()
        ours = head is not None and local_ray.is_attached(head.address)
        name = None
        if parsed.pool is not None or pools_here() or not ours:
            name = _choose(parsed.pool)
            try:
                drain_gateways(name, say=say)
            finally:  # interrupted, it ends at once
                end_pool(name)
            print(f"pool {name!r} has ended")
        last = ours and not pools_here()
    if head is not None and last and stop_unused(head):
        print(
            f"and the Ray head at {head.address} with it" if name else f"no pool; the Ray head at {head.address} ended"
        )
    return OK


@contextmanager
def connected(name: str | None) -> Iterator[EncoderPool]:
    """The pool of this name, or the only one there is. Raises what `_choose` does."""
    from cluster.lifecycle import local_ray
    from cluster.pool import EncoderPool

    with local_ray.attach() or nullcontext(), EncoderPool.connect(_choose(name)) as pool:
        yield pool


def _choose(name: str | None) -> str:
    """The pool that is meant. Raises ConfigError when that is not clear, WorkerStartError where there is none."""
    from cluster.lifecycle.actors import pools_here

    if name is not None:
        return name
    pools = pools_here()
    if not pools:
        raise WorkerStartError("no pool is running here")
    if len(pools) > 1:
        raise ConfigError(f"name a pool, this cluster has {', '.join(pools)}")
    return pools[0]


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number")
    return int(text)
