"""What a gateway counts of itself, for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from cluster.gateway.limits import Room

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Counters:
    """One gateway's numbers."""

    def __init__(self, room: Room) -> None:
        """`room` tells what is under way when somebody asks."""
        self.registry = CollectorRegistry()
        self._room = room
        self.requests = Counter(
            "encpool_gateway_requests",
            "Requests answered, by route and HTTP status (499: the client hung up).",
            ("route", "status"),
            registry=self.registry,
        )
        self.seconds = Histogram(
            "encpool_gateway_request_seconds",
            "From a request's head to the end of its answer, by route.",
            ("route",),
            registry=self.registry,
            buckets=SECONDS,
        )
        self.items = Counter(
            "encpool_gateway_items", "Items answered, by HTTP status.", ("status",), registry=self.registry
        )
        self.received = Counter("encpool_gateway_received_bytes", "Bytes of request bodies.", registry=self.registry)
        self.sent = Counter("encpool_gateway_sent_bytes", "Bytes of tokens sent.", registry=self.registry)
        for name, help_text, value in (
            ("open_requests", "Requests under way.", lambda: room.num_requests),
            ("open_items", "Items under way.", lambda: room.num_items),
            ("open_bytes", "Bytes of requests under way, their tokens included.", lambda: room.num_bytes),
        ):
            Gauge(f"encpool_gateway_{name}", help_text, registry=self.registry).set_function(value)

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self.registry)
