"""One trace through client, router and worker; nothing where nobody asked for spans."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from fake_pool import FakePool, client
from fakes import FakeRunner, loader, picture
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from encoder.config import EncoderConfig
from workers import spans
from workers.config import WorkerConfig
from workers.worker import EncoderWorker


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """Spans of this process, whose program has set a provider of the SDK."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    yield exporter
    provider.shutdown()


@pytest.fixture
def pool() -> Iterator[FakePool]:
    """A router, and one real worker that answers every call."""
    config = WorkerConfig.model_validate(
        {"encoder": EncoderConfig(model="fake"), "device": "cpu", "decode_threads": 1, "cache_bytes": 2**20}
    )
    worker = EncoderWorker(config, "a", load=loader(FakeRunner()))
    worker.start()
    worker.wait_started(20)
    pool = FakePool("a")
    pool.answer = lambda worker_id, batch: worker.encode(batch)
    yield pool
    worker.close()


def name_of(span: ReadableSpan | None) -> str:
    return "" if span is None else span.name


def test_one_trace_goes_through_client_router_and_worker(recorded: InMemorySpanExporter, pool: FakePool) -> None:
    tracer = trace.get_tracer_provider().get_tracer("test")
    with tracer.start_as_current_span("request") as request:
        assert all(outcome.error is None for outcome in client(pool).encode_many([picture(1), picture(2)]))
    made = recorded.get_finished_spans()
    by_id = {span.context.span_id: span for span in made if span.context}
    parents = {(span.name, name_of(by_id.get(span.parent.span_id))) for span in made if span.parent}
    assert parents == {
        ("encpool.lease", "request"),
        ("encpool.route", "encpool.lease"),
        ("encpool.call", "request"),
        ("encpool.encode", "encpool.call"),
        ("decode", "encpool.encode"),
        ("wait", "encpool.encode"),
        ("replay", "encpool.encode"),
    }
    assert {span.context.trace_id for span in made if span.context} == {request.get_span_context().trace_id}
    for span in made:
        assert span.start_time is not None
        assert span.end_time is not None
        assert span.start_time <= span.end_time
    assert [span.attributes for span in made if span.name == "encpool.encode"] == [{"worker": "a", "items": 2}]


def test_no_span_is_made_outside_of_one(recorded: InMemorySpanExporter, pool: FakePool) -> None:
    assert all(outcome.error is None for outcome in client(pool).encode_many([picture(1)]))
    assert recorded.get_finished_spans() == ()


def test_without_a_provider_nothing_is_made_or_sent(pool: FakePool) -> None:
    batches = []
    answer = pool.answer
    pool.answer = lambda worker_id, batch: batches.append(batch) or answer(worker_id, batch)
    assert all(outcome.error is None for outcome in client(pool).encode_many([picture(1)]))
    assert [batch.trace for batch in batches] == [""]


def test_without_the_sdk_it_is_not_even_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "opentelemetry.sdk.trace")
    assert spans.current() == ""
    with spans.span("s", "00-" + "1" * 32 + "-" + "2" * 16 + "-01") as here:
        assert here == ""
    assert "opentelemetry.sdk.trace" not in sys.modules


def test_a_collector_that_cannot_be_reached_for_want_of_a_package_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(spans.ENDPOINT, "http://localhost:4318")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    spans.set_up("test")
    assert "encpool[otel]" in caplog.text
