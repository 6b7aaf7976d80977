"""How a client reaches the router and the workers: what it needs (`Transport`), and Ray's way (`RayTransport`)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError, RayError, RayTaskError

from cluster.lifecycle.actors import WorkerHandles
from cluster.routing.assign import NO_WORKER_RETRY_MS
from cluster.routing.leases import Answer, Ask, Refusal
from cluster.streams.gate import Gate
from cluster.streams.slabs import Lent, Slabs
from encoder.errors import EncodeError, EncoderPoolError, PoolClosedError, PoolSaturatedError
from encoder.travel import MESSAGE_BYTES, from_bytes, to_bytes
from workers.messages import EncodeBatch, EncodeResult

logger = logging.getLogger(__name__)

FOLLOW_S = 1.0  # between two looks at who belongs to the pool
FETCH_TIMEOUT_S = 60.0  # for an answer that is known to be there
NEVER_SENT = ("The actor is restarting", "failed to connect")  # in Ray's errors about an actor that cannot be reached


class WorkerGone(Exception):
    """The worker died or cannot be reached; whether the call ran is unknown."""


class WorkerAway(WorkerGone):
    """The worker is restarting or just died: the call never reached it."""


class Transport(Protocol):
    """Calls that a client makes. A `call` is whatever `start` returns; it must be hashable."""

    def lease(self, ask: Ask) -> Answer:
        """A lease or refusal for each item; refusals when the router itself is away.

        Raises PoolClosedError when it is gone for good.
        """

    def start(self, worker_id: str, batch: EncodeBatch) -> Any:
        """Send a batch and return at once. Raises PoolSaturatedError when there is no room to put it."""

    def wait(self, calls: Sequence[Any], timeout_s: float) -> list[Any]:
        """Those of the calls that are done; waits for the first one, at most so long."""

    def result(self, call: Any) -> EncodeResult:
        """The answer of a call that is done. Raises WorkerGone, or an EncoderPoolError about the whole call."""

    def cancel(self, worker_id: str, call_id: str, numbers: Sequence[int] | None = None) -> None:
        """Tell a worker that nobody awaits a call any more, or only these items of it."""

    def suspect(self, incarnation: str) -> None:
        """Tell the router that a worker seems dead."""

    def release(self, lease_ids: Sequence[int]) -> None:
        """Give leases back unused."""

    def hello(self, client: str) -> None:
        """Tell the router that a client lives. Raises PoolClosedError."""

    def quarantine(self, left_s: dict[bytes, float]) -> None:
        """Tell the router which content, by digest, is to be refused for how long."""


@dataclass(slots=True, eq=False)
class RayCall:
    """A call under way, and its answer once that was fetched."""

    worker_id: str
    ref: Any = None  # of the answer; None: the worker is not there
    lent: Lent | None = None  # what went beside the message
    answer: Future[bytes | EncodeResult] | None = None

    def when_done(self, then: Callable[[], object]) -> None:
        """Call `then`, from any thread, when `result` would return at once."""
        if self.ref is None:
            then()
            return
        self.answer = self.ref.future()
        self.answer.add_done_callback(lambda _: then())

    def fetch(self, timeout_s: float) -> bytes | EncodeResult:
        """The answer. Raises GetTimeoutError, and what came instead."""
        if self.answer is not None:
            return self.answer.result(timeout_s)
        answer: bytes | EncodeResult = ray.get(self.ref, timeout=timeout_s)
        return answer

    def await_alone(self, timeout_s: float) -> bool:
        """Fetch the answer as soon as it is there; whether it came in time. One step less than to wait, then fetch."""
        answer: Future[bytes | EncodeResult] = Future()
        try:
            answer.set_result(self.fetch(timeout_s))
        except GetTimeoutError:
            return False
        except Exception as error:  # whatever the call came to: `fetch` raises it
            answer.set_exception(error)
        self.answer = answer
        return True


class RayTransport:
    """Actor calls. Every wait has a limit. Once its gate is shut, every call raises PoolClosedError.

    It follows who comes and goes: a worker that a lease names is looked up by its name, and now and then the router
    is asked who is there.
    """

    def __init__(
        self,
        router: Any,
        workers: WorkerHandles,
        *,
        timeout_s: float,
        max_shared_bytes: int = 0,
        gate: Gate | None = None,
    ) -> None:
        """`timeout_s` bounds calls to the router, `max_shared_bytes` memory that is lent to workers near by."""
        self.gate = gate or Gate(connected=ray.is_initialized)
        self.workers = workers
        self._router = router
        self._timeout_s = timeout_s
        self._slabs = Slabs(max_shared_bytes)
        self._census: Any = None  # a question under way: who is there
        self._census_s = time.monotonic()
        self._census_lock = threading.Lock()

    def num_workers(self) -> int:
        """Workers that this client knows of."""
        return len(self.workers)

    def lease(self, ask: Ask) -> Answer:
        try:
            with self.gate:
                self._follow()
                call = self._router.ask.remote(to_bytes(tuple(ask)))
                try:
                    answer = ray.get(call, timeout=self._timeout_s)
                except BaseException:  # Ctrl-C, or it takes too long: the leases come all the same
                    call.future().add_done_callback(self._return_leases)
                    raise
                return Answer._make(from_bytes(answer))
        except ActorDiedError as error:  # not one that restarts: somebody has ended the pool
            raise PoolClosedError("the pool was ended: its router is gone") from error
        except (RayActorError, GetTimeoutError) as error:
            away = Refusal(
                saturated=False,
                retry_ms=NO_WORKER_RETRY_MS,
                message=f"the router does not answer ({type(error).__name__})",
            )
            return Answer(0, [away] * len(ask.which))

    def _return_leases(self, late: Future[bytes]) -> None:
        """Of an answer that nobody waits for any more: in force, they would keep others from their workers."""
        if late.exception() is None:
            answer = Answer._make(from_bytes(late.result()))
            with suppress(PoolClosedError):
                self.release(range(answer.first, answer.first + len(answer.entries)))

    def _follow(self) -> None:
        """Ask the router now and then who is there, without waiting for the answer."""
        if not self._census_lock.acquire(blocking=False):
            return  # another thread is at it
        try:
            now_s = time.monotonic()
            if self._census is None and now_s - self._census_s > FOLLOW_S:
                self._census, self._census_s = self._router.worker_ids.remote(), now_s
            elif self._census is not None and ray.wait([self._census], timeout=0)[0]:
                census, self._census = self._census, None
                self.workers.keep(ray.get(census, timeout=self._timeout_s))
        except RayError as error:  # it restarts; those known so far will do
            logger.info("the router does not say who is there: %s", type(error).__name__)
        finally:
            self._census_lock.release()

    def start(self, worker_id: str, batch: EncodeBatch) -> Any:
        try:
            with self.gate:
                # A group of its own, or the call would queue behind those of batch items for one of their threads.
                encode = self.workers.handle(worker_id).encode.options(concurrency_group=str(batch.priority))
                sent, lent = self._slabs.lend(worker_id, batch)
                is_small = sum(item.encoded.nbytes for item in sent.items) <= MESSAGE_BYTES
                return RayCall(worker_id, encode.remote(to_bytes(sent) if is_small else sent), lent)
        except ValueError:  # it left the pool a moment ago
            return RayCall(worker_id)
        except RayError as error:
            raise PoolSaturatedError(f"Ray has no room for {len(batch.items)} items: {error}") from error

    def wait(self, calls: Sequence[Any], timeout_s: float) -> list[Any]:
        with self.gate:
            done = [call for call in calls if call.ref is None]
            refs = {call.ref: call for call in calls if call.ref is not None}
            if len(calls) == 1 and not done and timeout_s > 0:
                return [call for call in calls if call.await_alone(timeout_s)]
            ready = ray.wait(list(refs), num_returns=len(refs), timeout=0)[0] if refs else []
            if not ready and not done and timeout_s > 0:
                ready, _ = ray.wait(list(refs), num_returns=1, timeout=timeout_s)
            return [*done, *(refs[ref] for ref in ready)]

    def result(self, call: Any) -> EncodeResult:
        try:
            with self.gate:
                if call.ref is None:
                    raise WorkerAway(f"{call.worker_id} has left the pool")
                answer = call.fetch(FETCH_TIMEOUT_S)
                result: EncodeResult = from_bytes(answer) if isinstance(answer, bytes) else answer
                return result if call.lent is None else self._slabs.receive(call.lent, result)
        except EncoderPoolError:  # raised by the worker: Ray keeps its type
            raise
        except RayTaskError as error:  # a bug of ours in the worker: the traceback is in its log
            raise EncodeError(f"the worker failed on the whole call: {error.cause!r}") from error
        except RayError as error:
            kind = WorkerAway if any(said in str(error) for said in NEVER_SENT) else WorkerGone
            raise kind(f"{type(error).__name__}: {error}") from error

    def cancel(self, worker_id: str, call_id: str, numbers: Sequence[int] | None = None) -> None:
        with self.gate, suppress(ValueError):  # it left the pool, and the call with it
            self.workers.handle(worker_id).cancel.remote(call_id, numbers)

    def suspect(self, incarnation: str) -> None:
        with self.gate:
            worker_id = incarnation.rpartition("/")[0]
            self.workers.drop(worker_id)
            self._slabs.forget(worker_id)
            self._router.suspect.remote(incarnation)

    def release(self, lease_ids: Sequence[int]) -> None:
        with self.gate:
            self._router.release.remote(list(lease_ids))

    def hello(self, client: str) -> None:
        with self.gate:
            self._router.hello.remote(client)
        self._slabs.trim()  # hellos come until slabs of the last call are idle

    def quarantine(self, left_s: dict[bytes, float]) -> None:
        with self.gate:
            self._router.quarantine.remote(left_s)
