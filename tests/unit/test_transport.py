"""Ray's way to the router where calls are cut short. Without Ray."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import GetTimeoutError

from cluster.lifecycle.actors import WorkerHandles
from cluster.routing.leases import Answer, Refusal, pack
from cluster.streams.transport import RayTransport
from encoder.travel import to_bytes

GRANT = ("w", "w/1", None, 1.0)


class LateRouter:
    """Answers when the test says so, and notes which leases come back."""

    def __init__(self) -> None:
        self.answer: Future[bytes] = Future()
        self.returned: list[int] = []
        self.ask = SimpleNamespace(remote=lambda ask: SimpleNamespace(future=lambda: self.answer))
        self.release = SimpleNamespace(remote=self.take_back)

    def take_back(self, lease_ids: Sequence[int]) -> None:
        self.returned += lease_ids


@pytest.mark.parametrize("cut_short", [KeyboardInterrupt(), GetTimeoutError("too late")])
def test_leases_that_come_when_nobody_waits_any_more_return(
    monkeypatch: pytest.MonkeyPatch, cut_short: BaseException
) -> None:
    def get(call: object, **options: object) -> None:
        raise cut_short

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "get", get)
    router = LateRouter()
    transport = RayTransport(router, WorkerHandles("none"), timeout_s=1)
    if isinstance(cut_short, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            transport.lease(pack([]))
    else:
        assert transport.lease(pack([])).entries == []
    assert router.returned == []
    full = Refusal(saturated=True, retry_ms=1.0, message="full")
    router.answer.set_result(to_bytes(tuple(Answer(7, [GRANT, full, GRANT]))))
    assert router.returned == [7, 8, 9]


def test_a_router_that_dies_before_it_answers_has_given_no_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(call: object, **options: object) -> None:
        raise GetTimeoutError("too late")

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "get", get)
    router = LateRouter()
    RayTransport(router, WorkerHandles("none"), timeout_s=1).lease(pack([]))
    router.answer.set_exception(ray.exceptions.ActorDiedError())
    assert router.returned == []
