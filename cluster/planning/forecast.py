"""What traffic will cost on given graph sets: prices of every kind of item, and the best spread of them over workers.

Pure arithmetic; no Ray, no torch. Arrays carry their dimensions as capital suffixes.
"""

# Shapes: I kinds of items, R rows (one for each grid of each kind), K candidate graphs, W workers, G groups of equal
# workers.

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from cluster.planning.histogram import Grids
from encoder.packing import EAGER_MARGIN, EagerCost
from encoder.types import AxisKeys, Capacity, GraphKey, Grid, SegmentShape

EAGER_PATCHES = 16_384  # that one eager run joins when many segments wait
_NO_HOME = 1 << 20  # rank of axis keys that take no segment of a grid


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A graph that could be captured."""

    key: GraphKey
    capacity: Capacity
    cost_ms: float  # of one replay at speed 1, however full
    num_bytes: int  # that it alone takes: inputs, outputs, what the recording holds
    shared_bytes: int = 0  # scratch from the pool all graphs of a worker share: only the largest one counts


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRoom:
    """What one worker offers."""

    worker_id: str
    memory_bytes: int  # for graphs
    speed: float = 1.0  # work done in the time that costs are measured in


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What traffic will take, if the router spreads it as well as can be. Times are GPU milliseconds per second."""

    ms_per_s: float  # over all workers
    busiest_ms_per_s: float  # on the worker that has most to do; above 1000 the pool falls behind
    eager_ms_per_s: float  # over all workers, without any graph
    hit_rate: float  # share of segments that graphs serve
    fill: float  # useful rows of replays over rows run; 0 without replays

    @property
    def saved(self) -> float:
        """Share of the eager time that graphs save."""
        return 1 - self.ms_per_s / self.eager_ms_per_s if self.eager_ms_per_s else 0.0


@dataclass(frozen=True, slots=True)
class Holding:
    """A set of graphs and what it means for each row: its home's rank, price in ms, and patches run for it."""

    graphs: tuple[int, ...]
    rank_R: np.ndarray
    price_R: np.ndarray
    run_R: np.ndarray  # 0: eagerly


class Prices:
    """Prices of kinds of items, in ms at speed 1, on any set of the candidates.

    A segment goes home to the tightest axis keys that a held graph lets it into, as packing does, and there to the
    cheapest budget, or runs eagerly if that was measured and costs clearly less. An item that finds its worker busy (a
    share `busy` of them, as arrivals at random see it) rides in a full replay and pays for the room it takes; one that
    finds it idle pays for whole replays of its own, padding included.
    """

    def __init__(
        self,
        traffic: Mapping[Grids, float],
        candidates: Sequence[Candidate],
        *,
        axis_choices: Callable[[Grid], list[AxisKeys]],
        measure: Callable[[Grid], SegmentShape],
        eager: EagerCost,
        total_speed: float,
        busy: float | None = None,
    ) -> None:
        """`traffic` is items per second of each kind; `busy` is inferred from it when None."""
        kinds = sorted((grids, rate) for grids, rate in traffic.items() if grids and rate > 0)
        self.candidates = tuple(candidates)
        self.rate_I = np.array([rate for _, rate in kinds], dtype=float)
        self.own_bytes_K = np.array([one.num_bytes for one in candidates], dtype=float)  # exact up to 2**53
        self.shared_bytes_K = np.array([one.shared_bytes for one in candidates], dtype=float)
        self._cost_K = np.array([max(one.cost_ms, 1e-9) for one in candidates], dtype=float)
        self._rows = [(kind, grid, n) for kind, (grids, _) in enumerate(kinds) for grid, n in Counter(grids).items()]
        shapes = {grid: measure(grid) for _, grid, _ in self._rows}
        self.kind_R = np.array([kind for kind, _, _ in self._rows], dtype=int)
        self._start_I = np.searchsorted(self.kind_R, np.arange(len(kinds)))
        self.count_R = np.array([n for _, _, n in self._rows], dtype=float)
        self.patches_R = np.array([n * shapes[grid].num_patches for _, grid, n in self._rows], dtype=float)
        self._tokens_R = np.array([n * shapes[grid].num_tokens for _, grid, n in self._rows], dtype=float)
        self.rank_RK = self._ranks(shapes, axis_choices)
        self.holds_RK = self.rank_RK < _NO_HOME
        self._price(eager, 1.0)
        self.busy = busy if busy is not None else self._infer_busy(total_speed)
        self._price(eager, self.busy)

    def _ranks(self, shapes: Mapping[Grid, SegmentShape], axis_choices: Callable[[Grid], list[AxisKeys]]) -> np.ndarray:
        """How tight each graph is for each row; _NO_HOME where it takes none of its segments."""
        ranks: dict[Grid, list[int]] = {}
        for grid, shape in shapes.items():
            order = {keys: rank for rank, keys in enumerate(axis_choices(grid))}
            ranks[grid] = [
                order.get(one.key.axis_keys, _NO_HOME) if one.capacity.admits(shape) else _NO_HOME
                for one in self.candidates
            ]
        return np.array([ranks[grid] for _, grid, _ in self._rows], dtype=int).reshape(
            len(self._rows), len(self.candidates)
        )

    def _price(self, eager: EagerCost, busy: float) -> None:
        """Set `eager_R`, `price_RK` and `run_RK`: ms of a row, and the patches that replays run for it."""
        useful_I = self.by_kind(self.patches_R)
        full_R = self.patches_R * (eager.ms_per_patch + eager.base_ms / EAGER_PATCHES)
        alone_R = self.patches_R * (eager.ms_per_patch + eager.base_ms / useful_I[self.kind_R])
        self.eager_R = busy * full_R + (1 - busy) * alone_R
        amounts = (self.patches_R, self.count_R, self._tokens_R)
        rooms = [(one.capacity.patches, one.capacity.segments, one.capacity.tokens) for one in self.candidates]
        room_CK = np.array(rooms, dtype=float).reshape(-1, 3).T
        share_RK = np.max([a_R[:, None] / room_K for a_R, room_K in zip(amounts, room_CK, strict=True)], axis=0)
        # Alone, all segments of an item that may enter the graph ride together, in as many replays as it takes.
        share_IK = np.max(
            [self.by_kind(a_R[:, None] * self.holds_RK) / room_K for a_R, room_K in zip(amounts, room_CK, strict=True)],
            axis=0,
        )
        riding_RK = self.by_kind(self.patches_R[:, None] * self.holds_RK)[self.kind_R]
        part_RK = np.divide(
            self.patches_R[:, None] * self.holds_RK, riding_RK, out=np.zeros_like(riding_RK), where=riding_RK > 0
        )
        replays_RK = busy * share_RK + (1 - busy) * np.ceil(share_IK - 1e-9)[self.kind_R] * part_RK
        self.price_RK = replays_RK * self._cost_K
        self.run_RK = replays_RK * room_CK[0]
        if not eager.measured:  # such workers replay all that a graph holds, however slow it is
            dearest_R = np.where(self.holds_RK, self.price_RK, 0.0).max(axis=1, initial=0.0)
            self.eager_R = np.maximum(self.eager_R, dearest_R / EAGER_MARGIN)

    def _infer_busy(self, total_speed: float) -> float:
        """Share of time that workers are at work, if every segment had the cheapest graph and replays were full."""
        allowed_RK = np.where(self.holds_RK, self.price_RK, np.inf)
        best_R = np.minimum(self.eager_R, allowed_RK.min(axis=1, initial=np.inf))
        return min(1.0, float(self.rate_I @ self.by_kind(best_R)) / (1e3 * total_speed))

    def by_kind(self, values_R: np.ndarray) -> np.ndarray:
        """Sums over the rows of each kind of item."""
        if not len(self._start_I):
            return np.zeros((0, *values_R.shape[1:]))
        sums: np.ndarray = np.add.reduceat(values_R, self._start_I, axis=0)
        return sums

    def num_bytes(self, graphs: Sequence[int]) -> int:
        """Device memory of a set of candidates."""
        chosen = list(graphs)
        return int(self.own_bytes_K[chosen].sum() + self.shared_bytes_K[chosen].max(initial=0))

    def empty(self) -> Holding:
        """No graphs: everything runs eagerly."""
        return Holding((), np.full(len(self.kind_R), _NO_HOME), self.eager_R, np.zeros(len(self.kind_R)))

    def holding(self, graphs: Sequence[int]) -> Holding:
        """A set of candidates, by index."""
        held = self.empty()
        for k in graphs:
            held = self.with_graph(held, k)
        return held

    def with_graph(self, held: Holding, k: int) -> Holding:
        """The set with one more graph."""
        tighter_R, wins_R, worth_R = self._compare(held.rank_R, held.price_R, self.rank_RK[:, k], self.price_RK[:, k])
        by_graph_R = worth_R == self.price_RK[:, k]
        return Holding(
            (*held.graphs, k),
            np.where(tighter_R, self.rank_RK[:, k], held.rank_R),
            np.where(wins_R, worth_R, held.price_R),
            np.where(wins_R, np.where(by_graph_R, self.run_RK[:, k], 0.0), held.run_R),
        )

    def prices_with_each(self, held: Holding) -> np.ndarray:
        """Price of each kind with each graph added to the set, [I, K]."""
        rank_R1, price_R1 = held.rank_R[:, None], held.price_R[:, None]
        _, wins_RK, worth_RK = self._compare(rank_R1, price_R1, self.rank_RK, self.price_RK)
        return self.by_kind(np.where(wins_RK, worth_RK, price_R1))

    def _compare(
        self, held_rank: np.ndarray, held_price: np.ndarray, rank: np.ndarray, price: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Whether a graph is a tighter home, whether it sets the price, and the price it sets (eager if much less)."""
        eager = self.eager_R if price.ndim == 1 else self.eager_R[:, None]
        worth = np.where(price * EAGER_MARGIN <= eager, price, eager)
        tighter = rank < held_rank
        wins = tighter | ((rank == held_rank) & (rank < _NO_HOME) & (worth < held_price))
        return tighter, wins, worth


@dataclass(frozen=True, slots=True)
class Spread:
    """Traffic over groups of equal workers."""

    busiest_ms: float  # GPU milliseconds per second in the group that has most to do
    at_least_ms: float  # no spread does better than this, by duality
    share_IG: np.ndarray  # of each kind, what goes where
    worth_G: np.ndarray  # shadow price of a ms there: the best spread sends each kind where worth x price is least


def spread(price_IG: np.ndarray, rate_I: np.ndarray, speed_G: np.ndarray, *, rounds: int = 80) -> Spread:
    """Spread traffic so that the busiest group has as little to do as can be.

    Fractional scheduling on unrelated machines, solved in the dual: a group with more than its share of work gets
    dearer, traffic follows the prices by a softened minimum that sharpens from round to round (an entropic, annealed
    form of the auction of Bertsekas 1988). O(rounds x I x G); 1 % over the optimum on average, 5 % at worst in tests.
    """
    time_IG = np.maximum(price_IG, 1e-9) / speed_G
    log_time_IG = np.log(time_IG)
    log_worth_G = np.zeros(len(speed_G))
    best, bound = Spread(np.inf, 0.0, np.ones_like(time_IG), 1 / speed_G), 0.0
    for number in range(rounds):
        sharpness = 4.0 * 30.0 ** min(1.0, number / (0.8 * rounds))
        score_IG = -sharpness * (log_time_IG + log_worth_G)
        share_IG = np.exp(score_IG - score_IG.max(axis=1, keepdims=True))
        share_IG /= share_IG.sum(axis=1, keepdims=True)
        load_G = rate_I @ (share_IG * time_IG)
        busiest_ms = float(load_G.max())
        weight_G = np.exp(log_worth_G - log_worth_G.max())
        weight_G /= weight_G.sum()
        bound = max(bound, float(rate_I @ (time_IG * weight_G).min(axis=1)))
        if busiest_ms < best.busiest_ms:
            best = Spread(busiest_ms, bound, share_IG, weight_G / speed_G)
        log_load_G = np.log(np.maximum(load_G, 1e-30 * busiest_ms) / busiest_ms) if busiest_ms else load_G
        log_worth_G += np.clip(1.5 / (1 + sharpness) * log_load_G, -1.0, 1.0)
    return replace(best, at_least_ms=bound)


def forecast(prices: Prices, graphs: Sequence[Sequence[int]], speeds: Sequence[float]) -> Forecast:
    """What the traffic takes when each worker holds the given candidates, by index."""
    groups = dict(sorted(Counter((tuple(sorted(held)), s) for held, s in zip(graphs, speeds, strict=True)).items()))
    holdings = [prices.holding(held) for held, _ in groups]
    speed_G = np.array([speed * count for (_, speed), count in groups.items()])
    price_IG = np.stack([prices.by_kind(held.price_R) for held in holdings], axis=1)
    found = spread(price_IG, prices.rate_I, speed_G)
    flow_IG = found.share_IG * prices.rate_I[:, None]
    flow_RG = flow_IG[prices.kind_R]
    run_RG = np.stack([held.run_R for held in holdings], axis=1)
    hit_RG = run_RG > 0
    num_segments = float(prices.rate_I @ prices.by_kind(prices.count_R))
    run = float((flow_RG * run_RG).sum())
    return Forecast(
        ms_per_s=float((flow_IG * price_IG / [speed for _, speed in groups]).sum()),
        busiest_ms_per_s=found.busiest_ms,
        eager_ms_per_s=float(prices.rate_I @ prices.by_kind(prices.eager_R)) * len(speeds) / sum(speeds),
        hit_rate=float((flow_RG * hit_RG * prices.count_R[:, None]).sum()) / num_segments if num_segments else 0.0,
        fill=float((flow_RG * hit_RG * prices.patches_R[:, None]).sum()) / run if run else 0.0,
    )
