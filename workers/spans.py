"""Spans across client, router and worker, for OpenTelemetry; where nobody asked for them, a look into `sys.modules`.

They are made in a process whose tracer provider is the SDK's: its program set one, or `set_up` did. A span's context
travels as a W3C `traceparent`; an empty one stands for none, and then no span is made on the other side.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
    """A span that `end` ends; None without a parent or a provider."""
    tracer = _tracer() if parent else None
    if tracer is None:
        return None
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    context = TraceContextTextMapPropagator().extract({"traceparent": parent})
    return tracer.start_span(name, context, attributes=attributes)


def header(span: Span | None) -> str:
    """The span's context as it travels."""
    if span is None:
        return ""
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def end(span: Span | None, **attributes: str | int | float) -> None:
    """End a span that `start` gave."""
    if span is not None:
        span.set_attributes(attributes)
        span.end()


@contextmanager
def span(name: str, parent: str, **attributes: str | int | float) -> Iterator[str]:
    """A span around a block; gives the context for what is below it."""
    made = start(name, parent, **attributes)
    try:
        yield header(made)
    finally:
        end(made)


def past(name: str, parent: str, began_s: float, took_ms: float, **attributes: str | int | float) -> None:
    """A span of something that is over; `began_s` on the monotonic clock."""
    tracer = _tracer() if parent else None
    if tracer is None:
        return
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    context = TraceContextTextMapPropagator().extract({"traceparent": parent})
    began_ns = time.time_ns() - int((time.monotonic() - began_s) * 1e9)
    made = tracer.start_span(name, context, attributes=attributes, start_time=began_ns)
    made.end(began_ns + int(took_ms * 1e6))


def _tracer() -> Tracer | None:
    if "opentelemetry.sdk.trace" not in sys.modules:  # then nobody can have set its provider
        return None
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider

    provider = trace.get_tracer_provider()
    return provider.get_tracer("encpool") if isinstance(provider, TracerProvider) else None
