"""Which worker's cache an item's content is likely in, and whether to send it there. No Ray, no torch.

Least finish stays the rule. A worker that was given the same content before is expected to answer it from its cache,
so the item costs next to nothing there; it goes there unless that worker's backlog makes it later than elsewhere by
more than the GPU time it saves. The router learns of no eviction. It remembers of each worker no more tokens than its
cache holds, the latest ones, so that what it expects is mostly true.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from cluster.routing.assign import Home
from cluster.routing.desk import ModelDesk
from cluster.routing.plans import Plan, Seat
from cluster.routing.worker_view import WorkerView

HIT_SHARE = 0.05  # of an item's cost, in flight where a hit is expected: digest, copies, and hits that prove to be none
MAX_DIGESTS = 2**20


class Shelf:
    """Contents that one worker got lately: two generations, of which the older goes when the younger is half full."""

    __slots__ = ("incarnation", "num_tokens", "older", "room_tokens", "younger")

    def __init__(self, incarnation: str, room_tokens: int) -> None:
        self.incarnation = incarnation
        self.room_tokens = room_tokens
        self.num_tokens = 0  # of the younger generation
        self.younger: set[int] = set()
        self.older: set[int] = set()


class Homes:
    """Short content digests (`workers.cache_keys.short_digest`), each with the worker that got it last."""

    def __init__(self, max_digests: int = MAX_DIGESTS) -> None:
        self._max_digests = max_digests
        self._shelves: dict[str, Shelf] = {}
        self._homes: dict[int, str] = {}
        self.num_sent_home = 0

    def __len__(self) -> int:
        return len(self._homes)

    @property
    def any_open(self) -> bool:
        """Whether some worker has a cache."""
        return bool(self._shelves)

    def open(self, worker_id: str, incarnation: str, room_tokens: int) -> None:
        """A worker, and how many tokens its cache has room for. Another incarnation starts with nothing."""
        shelf = self._shelves.get(worker_id)
        if shelf is not None and shelf.incarnation == incarnation:
            shelf.room_tokens = room_tokens
            return
        self.close(worker_id)
        if room_tokens:
            self._shelves[worker_id] = Shelf(incarnation, room_tokens)

    def close(self, worker_id: str) -> None:
        """The worker, or what it had in its cache, is gone."""
        shelf = self._shelves.pop(worker_id, None)
        if shelf is not None:
            self._forget(worker_id, shelf.younger | shelf.older)

    def find(self, digest: int) -> str | None:
        """The worker whose cache this content is probably in."""
        return self._homes.get(digest)

    def note(self, digest: int, worker_id: str, num_tokens: int) -> None:
        """A worker is given this content."""
        shelf = self._shelves.get(worker_id)
        if shelf is None:
            return
        self._homes[digest] = worker_id
        if digest in shelf.younger:
            return
        shelf.younger.add(digest)
        shelf.num_tokens += num_tokens
        if shelf.num_tokens * 2 > shelf.room_tokens:
            self._turn(worker_id, shelf)
        if len(self._homes) > self._max_digests:
            for other_id, other in self._shelves.items():
                self._turn(other_id, other)

    def _turn(self, worker_id: str, shelf: Shelf) -> None:
        self._forget(worker_id, shelf.older - shelf.younger)
        shelf.younger, shelf.older, shelf.num_tokens = set(), shelf.younger, 0

    def _forget(self, worker_id: str, digests: set[int]) -> None:
        for digest in digests:
            if self._homes.get(digest) == worker_id:
                del self._homes[digest]


def homing(homes: Homes, desk: ModelDesk, views: Mapping[str, WorkerView], salt: int) -> Home:
    """How a model's items find home, and what is noted of where they go.

    Args:
        views: workers by id.
        salt: of the model: what it made of some content is at home apart from what others made of it.
    """

    def home(seat: Seat, plan: Plan, exclude: Collection[str], digest: int) -> Seat:
        digest ^= salt
        worker = views.get(homes.find(digest) or "")
        if worker is not None and worker in desk.index and worker.incarnation not in exclude:
            at_home = plan.at_home.get(worker)
            if at_home is None:
                at_home = plan.at_home[worker] = Seat(worker, worker.costs.quote(plan.grids), HIT_SHARE)
            if is_worth_it(at_home, seat):
                homes.num_sent_home += 1
                seat = at_home
        if not plan.num_tokens:
            plan.num_tokens = sum(desk.adapter.measure(grid).num_tokens for grid in plan.grids)
        homes.note(digest, seat.worker.worker_id, plan.num_tokens)
        return seat

    return home


def is_worth_it(home: Seat, elsewhere: Seat) -> bool:
    """Whether to send an item home: at worst it is later there, behind the whole backlog, by no more than it saves."""
    later_ms = home.worker.in_flight_ms + home.cost_ms - elsewhere.worker.in_flight_ms - elsewhere.cost_ms
    return later_ms <= elsewhere.cost_ms
