"""`RunnerStats`: what a runner has run, by graph and eagerly, and how well it filled them. Free of torch."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from encoder.graph_use import GraphUse
from encoder.packing import Replay
from encoder.types import Capacity, GraphKey, MissReason, SegmentShape

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class RunnerStats:
    """Counts since the start. The runner's thread writes; others may read at any time."""

    uses: defaultdict[GraphKey, GraphUse] = field(default_factory=lambda: defaultdict(GraphUse))
    eager_runs: int = 0
    eager_ms: float = 0.0  # that those which have ended took on the device
    misses: Counter[MissReason] = field(default_factory=Counter)  # segments that ran eagerly

    def _used(self) -> list[GraphUse]:
        return list(self.uses.values())  # a copy: a graph may be used for the first time meanwhile

    @property
    def num_replays(self) -> int:
        """Of all graphs."""
        return sum(use.replays for use in self._used())

    @property
    def hits(self) -> int:
        """Segments that a graph served."""
        return sum(use.segments for use in self._used())

    @property
    def hit_rate(self) -> float:
        """Share of segments that a graph served."""
        total = self.hits + self.misses.total()
        return self.hits / total if total else 0.0

    @property
    def device_ms(self) -> float:
        """Time that the device computed, in replays and eagerly."""
        return self.eager_ms + sum(use.real_ms for use in self._used())

    @property
    def useful_patches(self) -> int:
        """Of replays."""
        return sum(use.useful_patches for use in self._used())

    @property
    def replayed_patches(self) -> int:
        """Rows that replays ran."""
        return sum(use.run_patches for use in self._used())

    @property
    def fill(self) -> float:
        """Useful rows of replays over rows run."""
        return self.useful_patches / self.replayed_patches if self.replayed_patches else 0.0

    def count(self, replay: Replay, shapes: Sequence[SegmentShape], capacity: Capacity) -> None:
        """A run of these segments begins, in a graph of this capacity unless it is eager."""
        if replay.key is None:
            self.eager_runs += 1
            self.misses[replay.reason or MissReason.GRAPHS_OFF] += len(shapes)
            logger.debug("%s: %d segments ran eagerly", replay.reason, len(shapes))
            return
        use = self.uses[replay.key]
        use.replays += 1
        use.segments += len(shapes)
        use.useful_patches += sum(shape.num_patches for shape in shapes)
        use.run_patches += capacity.patches
