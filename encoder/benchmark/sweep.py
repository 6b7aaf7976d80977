"""Several models' figures side by side: how our graphs compare with each one's eager loop."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from encoder.benchmark.files import save_json, two_panels
from encoder.benchmark.rows import Report, Row

EAGER = "eager"  # how baselines' names begin


def table(reports: Sequence[Report]) -> str:
    """Throughput over that of the fastest eager loop, a model a line and a workload a column."""
    workloads = list(dict.fromkeys(row.workload for report in reports for row in report.rows))
    lines = [("x eager", *workloads)]
    for report in reports:
        ratios = {row.workload: f"{row.to_eager:.2f}" for row in ours(report)}
        lines.append((report.model, *(ratios.get(workload, "") for workload in workloads)))
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip() for line in lines
    )


def ours(report: Report) -> list[Row]:
    """The first of our engines, a row a workload."""
    mine = [row for row in report.rows if not row.engine.startswith((EAGER, "padded"))]
    return [row for row in mine if row.engine == mine[0].engine]


def write_json(reports: Sequence[Report], file: Path) -> None:
    """All figures of all models, for machines."""
    save_json({"reports": [report.as_dict() for report in reports]}, file)


def write_plot(reports: Sequence[Report], file: Path) -> None:
    """Ratios to eager of the saturated traffic and of the first single image.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    with two_panels(file, (13, 1.6 + 0.28 * len(reports))) as (figure, left, right):
        _bars(left, reports, "traffic", "Saturated traffic")
        _bars(right, reports, "448x448 alone", "One 448x448 image alone")
        right.set_yticklabels([])
        if reports:
            figure.suptitle(f"Our graphs beside an eager loop, {reports[0].device}, {reports[0].date}")


def _bars(axes: Any, reports: Sequence[Report], workload: str, title: str) -> None:
    """A bar a model, and a line where eager stands."""
    ratios = [next((row.to_eager for row in ours(each) if row.workload == workload), 0.0) for each in reports]
    bars = axes.barh(range(len(reports)), ratios)
    axes.bar_label(bars, fmt="{:.2f}", fontsize=7, padding=2)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(reports)), [report.model for report in reports])
    axes.invert_yaxis()
    axes.set(title=title, xlabel="throughput, x eager (more is better)")
    axes.spines[["top", "right"]].set_visible(False)
