"""Samples as Prometheus reads them: the text exposition format, version 0.0.4."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import accumulate

from workers.metric_names import BY_NAME, METRICS
from workers.samples import Distribution, Sample

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def render(samples: Iterable[Sample]) -> str:
    """The samples, each metric's together, with its help and type. Raises KeyError for names that are in no list."""
    by_name: defaultdict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        by_name[BY_NAME[sample.name].name].append(sample)
    lines: list[str] = []
    for metric in METRICS:
        if metric.name in by_name:
            lines += [f"# HELP {metric.name} {_escape(metric.help)}", f"# TYPE {metric.name} {metric.kind}"]
            for sample in by_name[metric.name]:
                lines += (f"{name}{_braces(labels)} {value:.17g}" for name, labels, value in series(sample))
    return "".join(f"{line}\n" for line in lines)


def series(sample: Sample) -> Iterator[tuple[str, dict[str, str], float]]:
    """The lines of a sample as name, labels and value; a histogram has one a bucket, cumulative, a sum and a count."""
    metric = BY_NAME[sample.name]
    labels = dict(zip(metric.labels, sample.labels, strict=True))
    if not isinstance(sample.value, Distribution):
        yield metric.name, labels, sample.value
        return
    ends = (*map(_number, metric.buckets), "+Inf")
    for end, count in zip(ends, accumulate(sample.value.counts), strict=True):
        yield f"{metric.name}_bucket", {**labels, "le": end}, count
    yield f"{metric.name}_sum", labels, sample.value.total
    yield f"{metric.name}_count", labels, sample.value.num_observations


def _number(value: float) -> str:
    return f"{value:g}"


def _braces(labels: dict[str, str]) -> str:
    pairs = ",".join(f'{name}="{_escape(value)}"' for name, value in labels.items())
    return f"{{{pairs}}}" if pairs else ""


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
