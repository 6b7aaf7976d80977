"""Spans across gateway, client, router and worker, for OpenTelemetry; a look into `sys.modules` where nobody asked.

They are made in a process whose tracer provider is the SDK's: its program set one, or `set_up` did. A span's context
travels as a W3C `traceparent`; an empty one stands for none, and then no span is made on the other side. Only a gateway
begins traces: `serving`.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, Tracer

logger = logging.getLogger(__name__)

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


def set_up(service: str) -> None:
    """Send this process's spans to the collector that the environment names; nothing when it names none.

    Needs the `otel` extra, and says so in the log where it is missing.
    """
    if not os.environ.get(ENDPOINT):
        return
    try:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        logger.warning("%s is set and no span is sent: %s; pip install 'encpool[otel]'", ENDPOINT, error)
        return
    provider = TracerProvider(resource=Resource.create({"service.name": service}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)


def current() -> str:
    """Context of the span that the caller is in."""
    if _tracer() is None:
        return ""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return carrier.get("traceparent", "")


def start(name: str, parent: str, **attributes: str | int | float) -> Span | None:
    """A span that its maker ends; None without a parent or a provider."""
    tracer = _tracer() if parent else None
    if tracer is None:
        return None
    return tracer.start_span(name, _context(parent), attributes=attributes)


@contextmanager
def serving(name: str, parent: str, **attributes: str | int | float) -> Iterator[Span | None]:
    """The span of a request from outside, around its block; without a parent, or with one that is none, a new trace."""
    tracer = _tracer()
    if tracer is None:
        yield None
        return
    from opentelemetry import trace

    made = tracer.start_span(name, _context(parent), kind=trace.SpanKind.SERVER, attributes=attributes)
    with trace.use_span(made, end_on_exit=True, record_exception=False, set_status_on_exception=False):
        yield made


def header(span: Span) -> str:
    """The span's context as it travels."""
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


class SharedSpan:
    """Work that is done at once for items of several traces: a span in each of them, with the number of its items."""

    def __init__(self, name: str, parents: Sequence[str], **attributes: str | int | float) -> None:
        """`parents`: the context of each item; none at all where no item has one."""
        self._parents = parents
        counts = Counter(filter(None, parents)) if any(parents) else {}
        made = {parent: start(name, parent, items=count, **attributes) for parent, count in counts.items()}
        self._made = {parent: span for parent, span in made.items() if span is not None}

    @property
    def headers(self) -> tuple[str, ...]:
        """The context for what is below it, of each item; none at all where there is no span."""
        found = {parent: header(span) for parent, span in self._made.items()}
        return tuple(found.get(parent, "") for parent in self._parents) if found else ()

    def end(self) -> None:
        """All of them."""
        for made in self._made.values():
            made.end()

    def __enter__(self) -> tuple[str, ...]:
        return self.headers

    def __exit__(self, *_: object) -> None:
        self.end()


def past(name: str, parent: str, began_s: float, took_ms: float, **attributes: str | int | float) -> None:
    """A span of something that is over; `began_s` on the monotonic clock."""
    tracer = _tracer() if parent else None
    if tracer is None:
        return
    began_ns = time.time_ns() - int((time.monotonic() - began_s) * 1e9)
    made = tracer.start_span(name, _context(parent), attributes=attributes, start_time=began_ns)
    made.end(began_ns + int(took_ms * 1e6))


def _context(parent: str) -> Context:
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({"traceparent": parent}, Context())  # nothing of this thread's own


def _tracer() -> Tracer | None:
    if "opentelemetry.sdk.trace" not in sys.modules:  # then nobody can have set its provider
        return None
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider

    provider = trace.get_tracer_provider()
    return provider.get_tracer("encpool") if isinstance(provider, TracerProvider) else None
