"""`RayExporter`: samples to `ray.util.metrics`; Ray's own Prometheus endpoints serve them as `ray_encpool_*`.

An update of one of Ray's metrics takes about 6 us, so they are updated once a second with what was counted until then,
not item by item. Buckets of a histogram go out as gauges of the names that Prometheus expects: Ray's own histogram
takes one value at a time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from workers.metric_names import BY_NAME
from workers.prometheus import series
from workers.samples import Sample

if TYPE_CHECKING:
    from ray.util.metrics import Counter, Gauge


INTERVAL_S = 1.0

Series = tuple[str, tuple[tuple[str, str], ...]]
"""A name, and its labels with their values."""


class RayExporter:
    """Exports the metrics of one meter. Any thread may call; one at a time exports, the others go on."""

    def __init__(self, *, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._next_s = float("-inf")
        self._lock = threading.Lock()
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._told: dict[Series, float] = {}

    def export(self, samples: Callable[[], Iterable[Sample]]) -> bool:
        """Tell Ray what changed, unless it was told within the interval; whether it was told now."""
        now_s = self._now_s()
        if now_s < self._next_s or not self._lock.acquire(blocking=False):
            return False
        try:
            self._next_s = now_s + INTERVAL_S
            gone = dict(self._told)
            for sample in samples():
                metric = BY_NAME[sample.name]
                for name, labels, value in series(sample):
                    gone.pop((name, tuple(labels.items())), None)
                    self._tell(name, labels, value, metric.kind == "counter", metric.help)
            for name, labels_given in gone:
                # Of a worker that left, a state that none is in: Ray would say the last value for ever.
                if name in self._gauges:
                    self._gauges[name].set(0.0, tags=dict(labels_given))
                    del self._told[name, labels_given]
        finally:
            self._lock.release()
        return True

    def _tell(self, name: str, labels: dict[str, str], value: float, is_counter: bool, help: str) -> None:
        from ray.util.metrics import Counter, Gauge

        key = (name, tuple(labels.items()))
        before = self._told.get(key)
        if value == before:
            return
        self._told[key] = value
        if not is_counter:
            if name not in self._gauges:
                self._gauges[name] = Gauge(name, description=help, tag_keys=tuple(labels))
            self._gauges[name].set(value, tags=labels)
            return
        if name not in self._counters:
            self._counters[name] = Counter(name, description=help, tag_keys=tuple(labels))
        if value > (before or 0):
            self._counters[name].inc(value - (before or 0), tags=labels)
