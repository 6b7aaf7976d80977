"""`PoolStats`: what all workers of a pool have done, added up."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from functools import cached_property

from cluster.routing.roster import Member
from workers.cache import CacheStats
from workers.messages import WorkerReport, WorkerStats


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Shares of what was done in some time; None where there was nothing to share."""

    hit_rate: float | None  # segments that a graph served
    fill: float | None  # useful rows of replays over rows run
    cached: float | None  # items that the caches answered


@dataclass(frozen=True, kw_only=True)
class PoolStats:
    """Counts of all workers that answered, each since its own start."""

    num_workers: int
    members: tuple[Member, ...]
    reports: tuple[WorkerReport, ...]  # of the workers that answered in time

    @cached_property
    def num_ready(self) -> int:
        """Workers that the router would send work to."""
        return sum(member.leasable for member in self.members)

    @cached_property
    def num_items(self) -> int:
        """Items settled, failed ones included."""
        return sum(report.stats.num_items for report in self.reports)

    @cached_property
    def segment_hits(self) -> int:
        """Segments that a graph served."""
        return sum(report.stats.segment_hits for report in self.reports)

    @cached_property
    def segment_misses(self) -> dict[str, int]:
        """Segments that ran eagerly, by reason."""
        total: Counter[str] = Counter()
        for report in self.reports:
            total.update(report.stats.segment_misses)
        return dict(total)

    @cached_property
    def num_segments(self) -> int:
        """Segments that ran, in a graph or eagerly."""
        return self.segment_hits + sum(self.segment_misses.values())

    @cached_property
    def device_ms(self) -> float:
        """Time that all devices together computed."""
        return sum(report.stats.device_ms for report in self.reports)

    @cached_property
    def hit_rate(self) -> float:
        """Share of segments that a graph served."""
        return self.segment_hits / self.num_segments if self.num_segments else 0.0

    @cached_property
    def failed_graphs(self) -> dict[str, str]:
        """Graphs that some worker could not capture at its start, and why; what they would take runs eagerly there."""
        return {str(key): reason for report in self.reports for key, reason in report.failed_graphs}

    @cached_property
    def cache(self) -> CacheStats:
        """What the workers' caches did and hold together."""
        each = [asdict(report.stats.cache) for report in self.reports]
        return CacheStats(**{name: sum(stats[name] for stats in each) for name in asdict(CacheStats())})

    @cached_property
    def fill(self) -> float:
        """Useful rows of replays over rows run."""
        run = sum(report.stats.run_patches for report in self.reports)
        return sum(report.stats.useful_patches for report in self.reports) / run if run else 0.0

    def rates_since(self, earlier: PoolStats) -> Rates:
        """What was done since then, whoever asked for it; of a worker that started anew, since its start."""
        before = {(report.worker_id, report.incarnation): report.stats for report in earlier.reports}
        done: Counter[str] = Counter()
        for report in self.reports:
            done.update(_counts(report.stats))
            done.subtract(_counts(before.get((report.worker_id, report.incarnation), WorkerStats())))
        return Rates(
            hit_rate=done["hits"] / done["segments"] if done["segments"] else None,
            fill=done["useful"] / done["run"] if done["run"] else None,
            cached=done["cached"] / done["looked up"] if done["looked up"] else None,
        )


def _counts(stats: WorkerStats) -> dict[str, int]:
    cached = stats.cache.hits + stats.cache.joins
    return {
        "hits": stats.segment_hits,
        "segments": stats.segment_hits + sum(stats.segment_misses.values()),
        "useful": stats.useful_patches,
        "run": stats.run_patches,
        "cached": cached,
        "looked up": cached + stats.cache.misses if stats.cache.max_bytes else 0,
    }
