"""How a client reaches the router and the workers: what it needs (`Transport`), and Ray's way (`RayTransport`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from cluster.router import LeaseRequest
from cluster.routing import NO_WORKER_RETRY_MS, Lease, Refusal
from encoder.errors import EncodeError, EncoderPoolError
from workers.messages import EncodeBatch, EncodeResult

FETCH_TIMEOUT_S = 60.0  # for an answer that is known to be there


class WorkerGone(Exception):
    """The worker died or cannot be reached; whether the call ran is unknown."""


class Transport(Protocol):
    """Calls that a client makes. A `call` is whatever `start` returns; it must be hashable."""

    def assign(self, requests: Sequence[LeaseRequest]) -> list[Lease | Refusal]:
        """A lease or refusal for each request; refusals when the router itself is away."""

    def start(self, worker_id: str, batch: EncodeBatch) -> Any:
        """Send a batch and return at once."""

    def wait(self, calls: Sequence[Any], timeout_s: float) -> list[Any]:
        """Those of the calls that are done; waits for the first one, at most so long."""

    def result(self, call: Any) -> EncodeResult:
        """The answer of a call that is done. Raises WorkerGone, or an EncoderPoolError about the whole call."""

    def cancel(self, worker_id: str, call_id: str) -> None:
        """Tell a worker that nobody awaits a call any more."""

    def suspect(self, incarnation: str) -> None:
        """Tell the router that a worker seems dead."""

    def release(self, lease_ids: Sequence[int]) -> None:
        """Give leases back unused."""


class RayTransport:
    """Actor calls. Every wait has a limit."""

    def __init__(self, router: Any, handle_of: Callable[[str], Any], *, timeout_s: float) -> None:
        """`handle_of` gives the actor handle of a worker id; `timeout_s` bounds calls to the router."""
        self._router = router
        self._handle_of = handle_of
        self._timeout_s = timeout_s

    def assign(self, requests: Sequence[LeaseRequest]) -> list[Lease | Refusal]:
        try:
            answer: list[Lease | Refusal] = ray.get(self._router.assign.remote(list(requests)), timeout=self._timeout_s)
        except (RayActorError, GetTimeoutError) as error:
            away = Refusal(
                saturated=False,
                retry_ms=NO_WORKER_RETRY_MS,
                message=f"the router does not answer ({type(error).__name__})",
            )
            return [away] * len(requests)
        return answer

    def start(self, worker_id: str, batch: EncodeBatch) -> Any:
        return self._handle_of(worker_id).encode.remote(batch)

    def wait(self, calls: Sequence[Any], timeout_s: float) -> list[Any]:
        done, _ = ray.wait(list(calls), num_returns=len(calls), timeout=0)
        if not done and timeout_s > 0:
            done, _ = ray.wait(list(calls), num_returns=1, timeout=timeout_s)
        return list(done)

    def result(self, call: Any) -> EncodeResult:
        try:
            result: EncodeResult = ray.get(call, timeout=FETCH_TIMEOUT_S)
        except EncoderPoolError:  # raised by the worker: Ray keeps its type
            raise
        except RayTaskError as error:  # a bug of ours in the worker: the traceback is in its log
            raise EncodeError(f"the worker failed on the whole call: {error.cause!r}") from error
        except RayError as error:
            raise WorkerGone(f"{type(error).__name__}: {error}") from error
        return result

    def cancel(self, worker_id: str, call_id: str) -> None:
        self._handle_of(worker_id).cancel.remote(call_id)

    def suspect(self, incarnation: str) -> None:
        self._router.suspect.remote(incarnation)

    def release(self, lease_ids: Sequence[int]) -> None:
        self._router.release.remote(list(lease_ids))
