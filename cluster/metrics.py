"""A pool's metrics as one text: what the router, the workers and a client have counted. No Ray, no torch.

`workers/metric_names.py` lists the names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from workers.messages import WorkerReport
from workers.metrics import samples_of
from workers.prometheus import CONTENT_TYPE as CONTENT_TYPE
from workers.prometheus import render
from workers.samples import Sample

if TYPE_CHECKING:
    from cluster.routing.roster import Member


def router_samples(
    members: Sequence[Member], *, num_asked: int, num_refused: int, num_sent_home: int
) -> Iterator[Sample]:
    """What a router knows."""
    for state, count in sorted(Counter(str(member.state) for member in members).items()):
        yield Sample("encpool_workers", (state,), count)
    yield Sample("encpool_workers_leasable", (), sum(member.leasable for member in members))
    yield Sample("encpool_leases_asked_total", (), num_asked)
    yield Sample("encpool_leases_refused_total", (), num_refused)
    yield Sample("encpool_leases_to_cache_total", (), num_sent_home)
    for member in members:
        yield Sample("encpool_leases_in_flight", (member.worker_id,), member.num_leases)
        yield Sample("encpool_in_flight_seconds", (member.worker_id,), member.in_flight_ms / 1e3)


def render_prometheus(reports: Iterable[WorkerReport], *others: Iterable[Sample]) -> str:
    """Workers' reports and other samples in Prometheus's text format, whose `CONTENT_TYPE` goes with it.

    Raises KeyError for a sample of a name that is not in the list.
    """
    samples = [sample for report in reports for sample in samples_of(report)]
    for more in others:
        samples += more
    return render(samples)
