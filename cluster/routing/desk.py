"""`ModelDesk`: what a router keeps apart for each model of its pool."""

from __future__ import annotations

import random
from collections.abc import Callable

from cluster.planning.traffic import TrafficLog
from cluster.routing.shares import Shares
from cluster.routing.worker_index import WorkerIndex
from encoder.adapters.base import EncoderAdapter
from workers.priority import Priority


class ModelDesk:
    """A model's workers and traffic. One thread at a time."""

    def __init__(self, adapter: EncoderAdapter, *, now_s: Callable[[], float], rng: random.Random) -> None:
        self.adapter = adapter
        self.index = WorkerIndex(axis_choices=adapter.axis_choices, measure=adapter.measure, rng=rng)
        """Of workers that may get leases."""
        self.traffic = TrafficLog(now_s=now_s)
        self.shares = {priority: Shares(now_s, self.index.__len__) for priority in Priority}

    def count(self) -> None:
        """Note the kinds of items that got leases since the last time."""
        self.traffic.histogram.count(self.index.take_counts())
