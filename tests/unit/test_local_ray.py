"""One Ray a process, shared by its pools; and calls that may not come after its end. Without Ray."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import pytest
import ray
from fakes import tiny_config
from ray.exceptions import ActorUnavailableError, GetTimeoutError

from cluster.config import PoolConfig
from cluster.lifecycle import local_ray
from cluster.lifecycle.actors import WorkerHandles
from cluster.lifecycle.head import Head
from cluster.lifecycle.launching import RayCrew
from cluster.routing.leases import pack
from cluster.streams.gate import Gate
from cluster.streams.transport import RayCall, RayTransport, WorkerAway, WorkerGone
from encoder.errors import PoolClosedError, WorkerStartError


class FakeRay:
    """Counts its starts and ends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failure: Exception | None = None) -> None:
        self.failure = failure
        self.num_starts = self.num_ends = 0
        self.up = False
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        monkeypatch.setattr(local_ray, "_own", None)
        for name, stand_in in (("init", self.init), ("shutdown", self.shutdown), ("is_initialized", lambda: self.up)):
            monkeypatch.setattr(ray, name, stand_in)

    def init(self, **options: Any) -> None:
        self.num_starts += 1
        self.options = options
        self.settings = {name: os.environ.get(name) for name in local_ray.NOTICE_DEATHS}
        if self.failure is not None:
            raise self.failure
        self.up = True

    def shutdown(self) -> None:
        self.num_ends += 1
        self.up = False


def test_pools_share_the_ray_that_the_first_one_started_and_the_last_one_ends_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = FakeRay(monkeypatch)
    first, second = local_ray.connect(tiny_config()), local_ray.connect(tiny_config())
    assert first is not None
    assert second is not None
    first.shutdown()
    assert fake.up
    second.shutdown()
    assert (fake.num_starts, fake.num_ends, fake.up) == (1, 1, False)
    third = local_ray.connect(tiny_config())
    assert third is not None
    third.shutdown()
    assert (fake.num_starts, fake.num_ends) == (2, 2)


def test_a_local_ray_has_the_cores_that_each_group_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeRay(monkeypatch)
    groups = [{"name": "small", "num_workers": 1}, {"name": "big", "num_workers": 2, "cpus_per_worker": 4000}]
    worker = {"encoder": {"model": "tiny-minicpmv-2.6"}}
    own = local_ray.connect(PoolConfig.model_validate({"groups": groups, "worker": worker}))
    assert fake.options["num_cpus"] == 8001
    assert own is not None
    own.shutdown()


@pytest.mark.parametrize("connect", [lambda: local_ray.connect(tiny_config()), lambda: local_ray.attach("a cluster")])
def test_ray_is_told_to_notice_deaths_soon_unless_the_user_said_otherwise(
    monkeypatch: pytest.MonkeyPatch, connect: Callable[[], local_ray.OwnRay | None]
) -> None:
    one, other = local_ray.NOTICE_DEATHS
    monkeypatch.setenv(other, "7")
    fake = FakeRay(monkeypatch)
    own = connect()
    assert own is not None
    assert fake.settings == {**local_ray.NOTICE_DEATHS, other: "7"}
    assert one not in os.environ
    assert os.environ[other] == "7"
    own.shutdown()


def test_somebody_elses_ray_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeRay(monkeypatch)
    fake.up = True
    assert local_ray.connect(tiny_config()) is None


@pytest.mark.timeout(20)
def test_an_address_where_nobody_listens_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeRay(monkeypatch)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for address in (f"127.0.0.1:{port}", "127.0.0.1:99999"):
        with pytest.raises(WorkerStartError, match=f"no Ray cluster at '{address}'"):
            local_ray.connect(tiny_config(ray_address=address))
    assert fake.num_starts == 0


@pytest.mark.parametrize("failure", [ConnectionError("not running"), KeyboardInterrupt()])
def test_what_a_head_of_ours_needs_of_the_environment_goes_when_it_is_not_reached(
    monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    def unreachable(address: str) -> None:
        raise failure

    head = Head(address="127.0.0.1:6379", pid=1, born="", temp_dir="", token_file="/token")
    FakeRay(monkeypatch)
    monkeypatch.setattr(local_ray, "running_head", lambda: head)
    monkeypatch.setattr(local_ray, "_read_authentication_anew", lambda: None)
    monkeypatch.setattr(local_ray, "_reach", unreachable)
    before = dict(os.environ)
    with pytest.raises((WorkerStartError, KeyboardInterrupt)):
        local_ray.attach()
    assert dict(os.environ) == before


@pytest.mark.parametrize("failure", [ValueError("invalid format"), ConnectionError("not running"), RuntimeError("odd")])
def test_an_address_that_ray_refuses_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch, failure: Exception) -> None:
    FakeRay(monkeypatch, failure)
    with pytest.raises(WorkerStartError, match="no Ray cluster at 'nowhere'"):
        local_ray.connect(tiny_config(ray_address="nowhere"))


@pytest.mark.parametrize("address", [None, "auto"])
def test_ray_is_told_a_command_line_that_is_no_text_in_a_form_that_it_can_note(
    monkeypatch: pytest.MonkeyPatch, address: str | None
) -> None:
    def command_line() -> str:
        return "encpool encode caf\udce9.png"  # bytes of Latin-1, as Python has them

    monkeypatch.setattr(ray._private.utils, "get_entrypoint_name", command_line)
    fake = FakeRay(monkeypatch)
    told: list[str] = []

    def init(**options: Any) -> None:
        told.append(ray._private.utils.get_entrypoint_name())
        fake.init(**options)

    monkeypatch.setattr(ray, "init", init)
    own = local_ray.connect(tiny_config(ray_address=address))
    assert told == [r"encpool encode caf\udce9.png"]
    assert ray._private.utils.get_entrypoint_name is command_line
    assert own is not None
    own.shutdown()


def test_a_shut_gate_lets_nobody_in_and_waits_for_those_inside() -> None:
    gate = Gate()
    entered, leave = threading.Event(), threading.Event()

    def call() -> None:
        with gate:
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=call)
    thread.start()
    entered.wait(10)
    assert gate.close()
    assert not gate.close()
    assert not gate.wait_empty(0.01)
    with pytest.raises(PoolClosedError), gate:
        pass
    leave.set()
    assert gate.wait_empty(10)
    thread.join()


@pytest.mark.parametrize("by", ["the pool", "somebody else"])
def test_a_closed_transport_makes_no_call_that_would_start_a_ray(monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    fake = FakeRay(monkeypatch)
    transport = RayTransport(object(), WorkerHandles("none"), timeout_s=1)
    if by == "the pool":
        fake.up = True
        transport.gate.close()
    calls = (
        lambda: transport.lease(pack([])),
        lambda: transport.wait([1], 1.0),
        lambda: transport.result(1),
        lambda: transport.cancel("w", "c"),
        lambda: transport.suspect("w/1"),
        lambda: transport.release([1]),
        lambda: transport.hello("client"),
        lambda: transport.quarantine({}),
    )
    for call in calls:
        with pytest.raises(PoolClosedError):
            call()
    assert fake.num_starts == 0


def test_who_looks_after_workers_starts_no_ray_where_somebody_has_ended_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeRay(monkeypatch)
    with pytest.raises(PoolClosedError, match="connection to Ray was shut down"):
        RayCrew("pool", tiny_config(), detached=False).look()
    assert fake.num_starts == 0


def test_a_router_that_does_not_answer_says_neither_who_is_there_nor_what_it_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def get(call: object, **options: object) -> None:
        raise GetTimeoutError("too late")

    monkeypatch.setattr(ray, "get", get)
    crew = RayCrew("pool", tiny_config(), detached=False)
    crew._router = MagicMock()
    assert crew.members() is None
    assert crew.num_refused() is None


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("IOError: The actor is restarting.", WorkerAway),
        ("RpcError: RPC error: failed to connect to all addresses; Connection refused", WorkerAway),
        ("RpcError: RPC error: Socket closed", WorkerGone),
    ],
)
def test_a_call_that_never_left_is_told_from_one_whose_worker_died(
    monkeypatch: pytest.MonkeyPatch, said: str, kind: type[WorkerGone]
) -> None:
    def get(call: object, **options: object) -> None:
        raise ActorUnavailableError(said, None)

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    with pytest.raises(WorkerGone) as caught:
        RayTransport(object(), WorkerHandles("none"), timeout_s=1).result(RayCall("w", 1))
    assert type(caught.value) is kind
