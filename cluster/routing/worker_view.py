"""`WorkerView`: a worker as the router sees it, with the work it has in flight. No Ray, no torch."""

from __future__ import annotations

from dataclasses import dataclass

from workers.admission import Load, wait_ms
from workers.costs import CostTable
from workers.messages import WorkerState

NOTHING_MS = 1e-6  # less is a rounding error


@dataclass(slots=True, kw_only=True, eq=False)
class WorkerView:
    """A worker as the router sees it. Only the router changes it."""

    worker_id: str
    incarnation: str
    state: WorkerState
    costs: CostTable
    max_queue_ms: float
    model: str = ""
    max_queue_bytes: int = 2**62
    in_flight_ms: float = 0.0  # cost of the leases on it, as the router counts them
    in_flight_bytes: int = 0  # encoded
    urgent_ms: float = 0.0  # of these, interactive ones
    urgent_bytes: int = 0
    heard_s: float = 0.0  # when it last reported
    suspect_until_s: float = 0.0  # a client found it dead; reports do not clear that before

    def wait_ms(self, cost_ms: float, num_bytes: int = 0, *, urgent: bool = False) -> float:
        """0 when so much more fits, else after how much work it should: by the rule that workers admit by.

        An idle worker takes any item.
        """
        total = Load(self.in_flight_ms, self.in_flight_bytes)
        own = Load(self.urgent_ms, self.urgent_bytes)
        if not urgent:
            own = total - own
        limit = Load(self.max_queue_ms, self.max_queue_bytes)
        return wait_ms(Load(cost_ms, num_bytes), total=total, own=own, limit=limit)

    def settle(self, cost_ms: float, num_bytes: int, *, urgent: bool) -> None:
        """So much less is in flight."""
        self.in_flight_ms -= cost_ms
        self.in_flight_bytes -= num_bytes
        if urgent:
            self.urgent_ms -= cost_ms
            self.urgent_bytes -= num_bytes
        # Rounding errors must not add up, or keep an idle worker "busy".
        if self.urgent_ms < NOTHING_MS:
            self.urgent_ms = 0.0
        if self.in_flight_ms - self.urgent_ms < NOTHING_MS:
            self.in_flight_ms = self.urgent_ms
