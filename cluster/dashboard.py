"""The Grafana dashboard of configs/grafana-dashboard.json, as code: `python -m cluster.dashboard > FILE` writes it.

The variable `prefix` says where Prometheus scrapes: empty for the gateway's `/metrics`, `ray_` for Ray's own endpoints.
"""

from __future__ import annotations

import json
from typing import Any

WIDTH, HEIGHT = 8, 8  # of a panel; a row of the grid has 24 columns
PER = "[$__rate_interval]"


def rate(name: str, *by: str) -> str:
    """Growth a second of a counter, added up but for some labels."""
    grouped = f" by ({', '.join(by)})" if by else ""
    return f"sum{grouped} (rate(${{prefix}}encpool_{name}{PER}))"


def total(name: str, *by: str) -> str:
    """A gauge, added up but for some labels."""
    grouped = f" by ({', '.join(by)})" if by else ""
    return f"sum{grouped} (${{prefix}}encpool_{name})"


def quantile(share: float, histogram: str, label: str) -> str:
    """A quantile of a histogram for each value of a label."""
    return f"histogram_quantile({share}, {rate(f'{histogram}_bucket', 'le', label)})"


ROWS: tuple[tuple[str, tuple[tuple[str, str, tuple[tuple[str, str], ...]], ...]], ...] = (
    # Row title; panels of title, unit, and queries with their legends.
    (
        "Traffic",
        (
            ("Items", "ops", ((rate("items_total", "outcome"), "{{outcome}}"),)),
            ("Tokens", "ops", ((rate("tokens_total", "worker"), "{{worker}}"),)),
            ("Time of each stage, 95th percentile", "s", ((quantile(0.95, "stage_seconds", "stage"), "{{stage}}"),)),
            ("Queue of each worker", "s", ((total("queue_seconds", "worker"), "{{worker}}"),)),
            ("Leases in flight", "short", ((total("leases_in_flight", "worker"), "{{worker}}"),)),
            (
                "Refused, retried, quarantined",
                "ops",
                (
                    (rate("leases_refused_total"), "refused: full"),
                    (rate("retries_total", "reason"), "retried: {{reason}}"),
                    (rate("quarantines_total"), "quarantined"),
                ),
            ),
        ),
    ),
    (
        "Graphs",
        (
            (
                "Segments served by graphs",
                "percentunit",
                (
                    (
                        f"{rate('segment_hits_total')} / ({rate('segment_hits_total')} + "
                        f"({rate('segment_misses_total')} or vector(0)))",
                        "hit rate",
                    ),
                ),
            ),
            ("Segments run eagerly, by reason", "ops", ((rate("segment_misses_total", "reason"), "{{reason}}"),)),
            (
                "Fill of replays",
                "percentunit",
                ((f"{rate('useful_patches_total', 'graph')} / {rate('run_patches_total', 'graph')}", "{{graph}}"),),
            ),
            ("Replays", "ops", ((rate("replays_total", "graph"), "{{graph}}"),)),
            (
                "GPU busy",
                "percentunit",
                (
                    (rate("gpu_seconds_total", "worker"), "replays, {{worker}}"),
                    (rate("eager_gpu_seconds_total", "worker"), "eager, {{worker}}"),
                ),
            ),
            (
                "GPU time, predicted over real",
                "percentunit",
                (
                    (
                        f"{rate('predicted_gpu_seconds_total', 'worker')} / {rate('gpu_seconds_total', 'worker')}",
                        "{{worker}}",
                    ),
                ),
            ),
            (
                "Memory of graphs, and what capturing took",
                "bytes",
                ((total("graph_bytes", "worker"), "{{worker}}"), (total("capture_seconds", "worker"), "s, {{worker}}")),
            ),
        ),
    ),
    (
        "Cache and pool",
        (
            (
                "Answered from the cache",
                "percentunit",
                (
                    (
                        f"{rate('cache_items_total', 'result')} / ignoring(result) group_left "
                        f"{rate('cache_items_total')}",
                        "{{result}}",
                    ),
                ),
            ),
            (
                "Cache",
                "bytes",
                ((total("cache_bytes", "worker"), "{{worker}}"), (total("cache_limit_bytes"), "limit of all")),
            ),
            ("Evictions", "ops", ((rate("cache_evictions_total", "worker"), "{{worker}}"),)),
            ("Workers", "short", ((total("workers", "state"), "{{state}}"), (total("workers_leasable"), "leasable"))),
            ("HTTP requests", "ops", ((rate("http_requests_total", "route", "status"), "{{route}} {{status}}"),)),
            ("HTTP time, 95th percentile", "s", ((quantile(0.95, "http_seconds", "route"), "{{route}}"),)),
        ),
    ),
)


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, members in ROWS:
        place = {"x": 0, "y": top, "w": 24, "h": 1}
        panels.append({"id": len(panels) + 1, "type": "row", "title": title, "collapsed": False, "gridPos": place})
        top += 1
        for number, (name, unit, queries) in enumerate(members):
            place = {"x": WIDTH * (number % 3), "y": top + HEIGHT * (number // 3), "w": WIDTH, "h": HEIGHT}
            panels.append(
                {
                    "id": len(panels) + 1,
                    "type": "timeseries",
                    "title": name,
                    "datasource": {"type": "prometheus", "uid": "${datasource}"},
                    "gridPos": place,
                    "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
                    "targets": [
                        {"refId": chr(ord("A") + index), "expr": expression, "legendFormat": legend}
                        for index, (expression, legend) in enumerate(queries)
                    ],
                }
            )
        top += HEIGHT * -(-len(members) // 3)
    return {
        "title": "encpool",
        "uid": "encpool",
        "schemaVersion": 39,
        "tags": ["encpool"],
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
                {
                    "name": "prefix",
                    "label": "Scraped from",
                    "type": "custom",
                    "query": "gateway : , Ray : ray_",
                    "current": {"text": "gateway", "value": ""},
                    "options": [
                        {"text": "gateway", "value": "", "selected": True},
                        {"text": "Ray", "value": "ray_", "selected": False},
                    ],
                },
            ]
        },
        "panels": panels,
    }


if __name__ == "__main__":
    print(json.dumps(dashboard(), indent=2))
