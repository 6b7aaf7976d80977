"""What a gateway counts of itself, under the names of `workers/metric_names.py`."""

from __future__ import annotations

from cluster.gateway.limits import Room
from workers.metrics import Meter
from workers.samples import Sample


class Counters:
    """One gateway's numbers."""

    def __init__(self, room: Room) -> None:
        """`room` tells what is under way when somebody asks."""
        self._room = room
        self._meter = Meter()

    def request(self, route: str, status: int, seconds: float) -> None:
        """A request was answered; 499: its client had hung up."""
        self._meter.add("encpool_http_requests_total", route, str(status))
        self._meter.observe("encpool_http_seconds", route, value=seconds)

    def item(self, status: int, num_bytes: int) -> None:
        """An item was answered, with so many bytes of tokens."""
        self._meter.add("encpool_http_items_total", str(status))
        if num_bytes:
            self._meter.add("encpool_http_sent_bytes_total", amount=num_bytes)

    def body(self, num_bytes: int) -> None:
        """A body came."""
        self._meter.add("encpool_http_received_bytes_total", amount=num_bytes)

    def samples(self) -> tuple[Sample, ...]:
        """Everything so far."""
        self._meter.set("encpool_http_in_flight", value=self._room.num_requests)
        self._meter.set("encpool_http_items_in_flight", value=self._room.num_items)
        self._meter.set("encpool_http_in_flight_bytes", value=self._room.num_bytes)
        return self._meter.samples()
