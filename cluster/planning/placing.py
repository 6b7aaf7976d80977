"""One greedy attempt at placing graphs on workers; `planning.plan` explains the method and picks among attempts."""

# Shapes: I kinds of items, R rows, K candidate graphs, G groups of equal workers.

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cluster.planning.forecast import Holding, Prices, spread

Sets = list[tuple[int, ...]]
"""Indices of candidates, by worker."""

_LEAST_GAIN = 1e-3  # of the busiest worker's time; what gains less waits for the leftovers
_SAME_ROUND = 0.5  # of a round's best gain a byte; what gains less waits until the relaxation is solved again


@dataclass(slots=True)
class _Worker:
    """A worker under planning."""

    speed: float
    limit_bytes: int
    held: Holding


class Placing:
    """One attempt: sets that only grow."""

    def __init__(
        self, prices: Prices, speeds: Sequence[float], limits: Sequence[int], sets: Sets | None = None
    ) -> None:
        """Begin with the given sets, or with nothing."""
        self._prices = prices
        self._workers = [
            _Worker(speed, limit, prices.holding(graphs))
            for speed, limit, graphs in zip(speeds, limits, sets or [()] * len(speeds), strict=True)
        ]

    def sets(self) -> Sets:
        """What each worker holds."""
        return [tuple(sorted(worker.held.graphs)) for worker in self._workers]

    def _groups(self) -> list[list[_Worker]]:
        """Workers that are equal in all that matters, in order."""
        groups: dict[tuple[float, int, tuple[int, ...]], list[_Worker]] = defaultdict(list)
        for worker in self._workers:
            groups[worker.speed, worker.limit_bytes, tuple(sorted(worker.held.graphs))].append(worker)
        return list(groups.values())

    def _extra_bytes(self, worker: _Worker) -> np.ndarray:
        """Bytes each candidate would add; infinite for those that do not fit, or are held."""
        graphs, prices = list(worker.held.graphs), self._prices
        shared = prices.shared_bytes_K[graphs].max(initial=0)
        extra_K: np.ndarray = prices.own_bytes_K + np.maximum(prices.shared_bytes_K - shared, 0)
        extra_K[prices.num_bytes(graphs) + extra_K > worker.limit_bytes] = np.inf
        extra_K[graphs] = np.inf
        extra_K[extra_K < 1] = 1
        return extra_K

    def _add(self, worker: _Worker, k: int) -> None:
        worker.held = self._prices.with_graph(worker.held, k)

    def cover(self) -> None:
        """Give every row that some graph serves a graph somewhere, most traffic first."""
        prices = self._prices
        weight_R = prices.rate_I[prices.kind_R] * prices.count_R
        open_R = np.ones(len(weight_R), dtype=bool)
        for worker in self._workers:
            open_R &= worker.held.price_R >= prices.eager_R
        pays_RK = prices.holds_RK & (prices.price_RK < prices.eager_R[:, None])
        while open_R.any():
            gain_K = (weight_R * open_R) @ pays_RK
            options = []
            for group in self._groups():
                extra_K = self._extra_bytes(group[0])
                options += [
                    (-gain_K[k], prices.num_bytes([int(k)]), int(k), -(group[0].limit_bytes - extra_K[k]), group[0])
                    for k in np.flatnonzero((gain_K > 0) & np.isfinite(extra_K))
                ]
            if not options:
                return
            _, _, k, _, worker = min(options, key=lambda option: option[:4])
            self._add(worker, k)
            open_R &= ~pays_RK[:, k]

    def by_shadow_price(self, *, by_byte: bool) -> None:
        """Add what gains most at the relaxation's prices, until nothing gains or fits."""
        while self._one_round(by_byte):
            pass

    def _one_round(self, by_byte: bool) -> bool:
        """Solve the relaxation and give each worker at most one graph; whether any got one."""
        prices, groups = self._prices, self._groups()
        speed_G = np.array([sum(worker.speed for worker in group) for group in groups])
        price_IG = np.stack([prices.by_kind(group[0].held.price_R) for group in groups], axis=1)
        now = spread(price_IG, prices.rate_I, speed_G)
        worth_I = (price_IG * now.worth_G).min(axis=1, initial=np.inf)
        left_I = prices.rate_I.copy()
        priced = [prices.prices_with_each(group[0].held) for group in groups]
        extra = [self._extra_bytes(group[0]) for group in groups]

        def best_use(g: int, graphs: slice | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            time_ms = now.busiest_ms * groups[g][0].speed
            return _best_use(priced[g][:, graphs], worth_I, now.worth_G[g], left_I, time_ms)

        heap: list[tuple[float, int, int]] = []
        for g in range(len(groups)):
            gain_K, _ = best_use(g, slice(None))
            wanted_K = np.isfinite(extra[g]) & (gain_K > _LEAST_GAIN * now.busiest_ms)
            heap += [(-gain_K[k] / (extra[g][k] if by_byte else 1), g, int(k)) for k in np.flatnonzero(wanted_K)]
        heapq.heapify(heap)
        enough = -heap[0][0] * _SAME_ROUND if heap else 0.0
        free = [list(reversed(group)) for group in groups]
        added = False
        while heap and -heap[0][0] >= enough:
            _, g, k = heapq.heappop(heap)
            if not free[g]:
                continue
            gain_1, use_I1 = best_use(g, np.array([k]))  # others may have taken the work meanwhile
            merit = float(gain_1[0]) / (extra[g][k] if by_byte else 1)
            if gain_1[0] <= _LEAST_GAIN * now.busiest_ms:
                continue
            if heap and merit < -heap[0][0]:
                heapq.heappush(heap, (-merit, g, k))
                continue
            self._add(free[g].pop(), k)
            left_I = np.maximum(left_I - use_I1[:, 0], 0.0)
            heapq.heappush(heap, (-merit, g, k))  # for the group's next worker
            added = True
        return added

    def use_leftovers(self) -> None:
        """Fill what memory remains: with what is cheaper than all that is held, then with copies."""
        prices = self._prices
        now = [prices.by_kind(worker.held.price_R) for worker in self._workers]
        best_I = np.min([*now, prices.by_kind(prices.eager_R)], axis=0)
        while True:
            options = []
            for group in self._groups():
                extra_K = self._extra_bytes(group[0])
                price_IK = prices.prices_with_each(group[0].held)
                gain_K = prices.rate_I @ np.maximum(best_I[:, None] - price_IK, 0.0)
                wanted = np.flatnonzero(np.isfinite(extra_K) & (gain_K > 1e-9 * max(1e-9, prices.rate_I @ best_I)))
                options += [(-gain_K[k] / extra_K[k], int(k), price_IK[:, k], group[0]) for k in wanted]
            if not options:
                break
            _, k, price_I, worker = min(options, key=lambda option: option[:2])
            self._add(worker, k)
            best_I = np.minimum(best_I, price_I)
        self.copy_everywhere()

    def copy_everywhere(self) -> None:
        """Give each worker what would gain most if it had an even share of all traffic, while anything gains."""
        prices = self._prices
        for group in self._groups():
            while True:
                worker = group[0]
                extra_K = self._extra_bytes(worker)
                price_I = prices.by_kind(worker.held.price_R)
                gain_K = prices.rate_I @ (price_I[:, None] - prices.prices_with_each(worker.held))
                merit_K = np.where(gain_K > 1e-9 * max(1e-9, prices.rate_I @ price_I), gain_K / extra_K, 0.0)
                if not merit_K.any():
                    break
                k = int(merit_K.argmax())
                for worker in group:
                    self._add(worker, k)


def _best_use(
    price_IK: np.ndarray, worth_I: np.ndarray, worth_ms: float, left_I: np.ndarray, time_ms: float
) -> tuple[np.ndarray, np.ndarray]:
    """Gain of the best use of a worker's time with each graph, and the items per second that it takes, [I, K].

    An item served there is worth what it costs the pool elsewhere, less this worker's time at its shadow price: a
    fractional knapsack, filled by gain a millisecond.
    """
    gain_IK = worth_I[:, None] / np.maximum(price_IK, 1e-9) - worth_ms  # a ms
    need_IK = np.where(gain_IK > 1e-9 * worth_ms, left_I[:, None] * price_IK, 0.0)
    order_IK = np.argsort(-gain_IK, axis=0, kind="stable")
    need_sorted = np.take_along_axis(need_IK, order_IK, axis=0)
    before = np.cumsum(need_sorted, axis=0) - need_sorted
    taken_sorted = np.clip(time_ms - before, 0.0, need_sorted)
    gain_K = (taken_sorted * np.take_along_axis(gain_IK, order_IK, axis=0)).sum(axis=0)
    taken_IK = np.empty_like(taken_sorted)
    np.put_along_axis(taken_IK, order_IK, taken_sorted, axis=0)
    return gain_K, taken_IK / np.maximum(price_IK, 1e-9)
