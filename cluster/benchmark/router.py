"""`encpool bench router`: what a decision takes, and what the decisions are worth. A table, JSON and a plot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cluster.benchmark.days import simulate_days
from cluster.benchmark.rates import measure_actor, measure_rate
from cluster.benchmark.simulated import BATCH
from cluster.notices import say
from cluster.tables import aligned
from encoder.benchmark.files import two_panels

POOLS = (8, 64, 512, 4096)


def bench_router(
    *, pools: Sequence[int] = POOLS, num_calls: int = 100, num_items: int = 60_000, with_ray: bool = True
) -> dict[str, Any]:
    """All figures."""
    report: dict[str, Any] = {"rates": [], "actor": None}
    for num_workers in pools:
        say(f"measuring decisions in process, {num_workers} workers ...")
        report["rates"].append(asdict(measure_rate(num_workers, num_calls=num_calls)))
    if with_ray:
        say("measuring decisions through the actor ...")
        report["actor"] = measure_actor(64, num_calls=num_calls)
    say("measuring a simulated day of traffic ...")
    report["days"] = [asdict(day) for day in simulate_days(64, num_items)]
    return report


def table(report: dict[str, Any]) -> str:
    """The figures as text."""
    header = ("workers", "items/s", "bare power of two", "ratio", "ms after a change")
    rows = [
        (n, f"{ours:,.0f}", f"{bare:,.0f}", f"{ours / bare:.2f}", f"{first_ms:.2f}")
        for n, ours, bare, first_ms in (tuple(rate.values()) for rate in report["rates"])
    ]
    parts = [aligned(header, rows, right=header)]
    if report["actor"]:
        lease, at_once = report["actor"]["ask"], report["actor"]["at_once"]
        parts.append(
            f"through the actor, {BATCH} items a call: {lease:,.0f} items/s, "
            f"{lease / at_once:.0%} of {at_once:,.0f} by a method that returns at once"
        )
    columns = ("a day's traffic", "done after h", "mean min", "p99 min", "hit rate")
    lines = [
        (policy, f"{makespan:.2f}", f"{mean:.2f}", f"{p99:.2f}", f"{hits:.1%}")
        for policy, makespan, mean, p99, hits in (tuple(day.values()) for day in report["days"])
    ]
    parts.append(aligned(columns, lines, right=columns[1:]))
    return "\n\n".join(parts)


def write_plot(report: dict[str, Any], file: Path) -> None:
    """Decisions a second by workers, and the days' makespans. Raises ConfigError without matplotlib."""
    with two_panels(file, (11, 4.2)) as (_, left, right):
        workers = [rate["num_workers"] for rate in report["rates"]]
        left.plot(workers, [rate["items_per_s"] for rate in report["rates"]], "o-", label="router")
        left.plot(workers, [rate["bare_items_per_s"] for rate in report["rates"]], "s--", label="bare power of two")
        left.set(xscale="log", ylim=0, xlabel="workers", ylabel="items/s", title="Decisions in process")
        left.legend(frameon=False)
        bars = right.barh([day["policy"] for day in report["days"]], [day["makespan_h"] for day in report["days"]])
        right.bar_label(bars, fmt="{:.1f}", padding=2)
        right.set(xlabel="hours until all is done", title="A simulated day on 64 workers")
        right.margins(x=0.12)
        right.invert_yaxis()
