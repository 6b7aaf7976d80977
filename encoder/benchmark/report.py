"""A bench's figures as a table, as JSON and as a plot."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from encoder.benchmark.files import two_panels
from encoder.benchmark.rows import Report, Row

COLUMNS = ("engine", "workload", "slices/s", "x eager", "% of peak", "fill", "GPU ms", "p50 ms", "p99 ms", "GiB")


def table(report: Report) -> str:
    """The figures, one engine on one workload a line."""
    lines = [COLUMNS, *(_cells(row) for row in report.rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(COLUMNS))]
    aligned = [
        "  ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    head = [
        f"{report.model}, {report.dtype}, on {report.device}; {versions}; {report.date}; medians of {report.repeats}",
        f"matmul peak {report.peak_tflops:.3g} TFLOP/s sustained; {report.num_graphs} graphs captured in "
        f"{report.capture_seconds:.1f} s, {report.capture_gib:.2f} GiB"
        + ("" if math.isnan(report.overlap) else f"; host to host at {report.overlap:.1%} of back-to-back replays"),
        *_preparation_lines(report),
        "cosine of tokens to float32, least and median: "
        + ", ".join(f"{engine} {least:.5f} {median:.5f}" for engine, (least, median) in report.cosines.items()),
        "",
    ]
    return "\n".join([*head, *aligned])


def _preparation_lines(report: Report) -> list[str]:
    figures = report.preparation
    if figures is None:
        return []
    rates = ", ".join(f"{rate:.0f} on {threads}" for threads, rate in figures.images_per_s.items())
    return [
        f"preparing a 1080p JPEG takes {figures.prepare_ms:.1f} ms, {figures.ratio:.2f} x Pillow's decode and resizes, "
        f"and {figures.helped_ms:.1f} ms on two threads; "
        f"images/s by threads: {rates}"
    ]


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.engine,
        row.workload,
        f"{row.slices_per_s:.0f}",
        f"{row.to_eager:.2f}",
        f"{row.peak_share:.1%}",
        f"{row.fill:.1%}",
        f"{row.device_ms:.2f}",
        f"{row.p50_ms:.2f}",
        f"{row.p99_ms:.2f}",
        f"{row.memory_gib:.2f}",
    )


def write_plot(report: Report, file: Path) -> None:
    """Throughput of the saturated workloads and latency of single images, side by side.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    with two_panels(file, (13, 4.8)) as (figure, left, right):
        single = [row for row in report.rows if "alone" in row.workload]
        _bars(left, [row for row in report.rows if row not in single], lambda row: row.slices_per_s, "{:.0f}")
        left.set(title="Saturated", ylabel="slices/s (more is better)")
        _bars(right, single, lambda row: row.device_ms, "{:.1f}")
        right.set(title="One image alone", ylabel="GPU time, ms, log scale (less is better)", yscale="log")
        (right if single else left).legend(frameon=False)
        figure.suptitle(f"{report.model}, {report.dtype}, {report.device}, {report.date}")


def _bars(axes: Any, rows: list[Row], value: Any, label: str) -> None:
    """Groups of bars: one group a workload, one bar an engine; without rows, nothing."""
    if not rows:
        axes.set_visible(False)
        return
    workloads = list(dict.fromkeys(row.workload for row in rows))
    engines = list(dict.fromkeys(row.engine for row in rows))
    width = 0.85 / len(engines)
    for number, engine in enumerate(engines):
        chosen = [row for row in rows if row.engine == engine]
        places = [workloads.index(row.workload) + (number - (len(engines) - 1) / 2) * width for row in chosen]
        bars = axes.bar(places, [value(row) for row in chosen], width, label=engine)
        axes.bar_label(bars, fmt=label, fontsize=7, padding=1)
    axes.set_xticks(range(len(workloads)), workloads)
    axes.spines[["top", "right"]].set_visible(False)
