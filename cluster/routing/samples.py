"""What a router knows, as metrics. No Ray, no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from cluster.routing.roster import Member
from workers.samples import Sample


def router_samples(
    members: Sequence[Member], *, num_asked: int, num_refused: int, num_sent_home: int
) -> Iterator[Sample]:
    """Its workers by state, what it was asked, and what is in flight."""
    for state, count in sorted(Counter(str(member.state) for member in members).items()):
        yield Sample("encpool_workers", (state,), count)
    yield Sample("encpool_workers_leasable", (), sum(member.leasable for member in members))
    yield Sample("encpool_leases_asked_total", (), num_asked)
    yield Sample("encpool_leases_refused_total", (), num_refused)
    yield Sample("encpool_leases_to_cache_total", (), num_sent_home)
    for member in members:
        yield Sample("encpool_leases_in_flight", (member.worker_id,), member.num_leases)
        yield Sample("encpool_in_flight_seconds", (member.worker_id,), member.in_flight_ms / 1e3)
