"""One trace through client, router and worker; nothing where nobody asked for spans."""

from __future__ import annotations

import base64
import json
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from fake_pool import FakePool, client
from fakes import FakeRunner, loader, picture, until
from http_calls import Caller
from live_gateway import live_gateway
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from cluster.gateway.wire import JSON
from cluster.http_client import HttpClient
from cluster.routing.leases import Answer, Ask
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


WAY = {
    ("encpool.lease", "POST /v1/encode"),
    ("encpool.route", "encpool.lease"),
    ("encpool.call", "POST /v1/encode"),
    ("encpool.encode", "encpool.call"),
    ("decode", "encpool.encode"),
    ("wait", "encpool.encode"),
    ("replay", "encpool.encode"),
}


def ways(made: Sequence[ReadableSpan]) -> dict[int, set[tuple[str, str]]]:
    """Spans and their parents, by trace."""
    by_id = {span.context.span_id: span for span in made if span.context}
    found: dict[int, set[tuple[str, str]]] = {}
    for span in made:
        if span.context and span.parent:
            parent = name_of(by_id.get(span.parent.span_id))
            found.setdefault(span.context.trace_id, set()).add((span.name, parent))
    return found


def finished(recorded: InMemorySpanExporter, num_spans: int) -> Sequence[ReadableSpan]:
    """A gateway ends its span after its answer."""
    until(lambda: len(recorded.get_finished_spans()) >= num_spans)
    return recorded.get_finished_spans()


def test_one_trace_goes_from_a_client_through_the_gateway_to_the_worker(recorded: InMemorySpanExporter) -> None:
    tracer = trace.get_tracer_provider().get_tracer("test")
    with live_gateway() as live, HttpClient(live.url) as http:
        with tracer.start_as_current_span("request"):
            http.encode(picture(1))
        made = finished(recorded, len(WAY) + 2)
        (way,) = ways(made).values()
        assert way == WAY | {("POST /v1/encode", "request")}
        (served,) = (span for span in made if span.kind is trace.SpanKind.SERVER)
        assert served.attributes == {"http.route": "/v1/encode", "http.response.status_code": 200}


def test_requests_that_share_a_call_are_a_whole_trace_each(recorded: InMemorySpanExporter) -> None:
    with live_gateway() as live:
        first_here, all_here = threading.Event(), threading.Event()
        lease = live.pool.lease

        def leases(ask: Ask) -> Answer:
            first_here.set()
            assert all_here.wait(20)
            return lease(ask)

        live.pool.lease = leases  # type: ignore[method-assign]

        def ask(number: int) -> None:
            with Caller(live.url) as caller:
                parent = f"00-{number:032x}-{number:016x}-01"
                body = json.dumps({"items": [base64.b64encode(picture(number)).decode()]})
                assert caller.post("/v1/encode", body, JSON, {"traceparent": parent}).status == 200

        with ThreadPoolExecutor(4) as threads:
            asked = [threads.submit(ask, 1)]
            assert first_here.wait(20)  # the dispatcher is with the router: the others come in meanwhile
            asked += [threads.submit(ask, number) for number in (2, 3)]
            until(lambda: len(live.dispatcher._inbox) == 2)
            all_here.set()
            for one in asked:
                one.result(30)
        found = ways(finished(recorded, 3 * (len(WAY) + 1)))
    assert {count for _, count in live.pool.log} >= {2}, "two of them went in one call"
    assert {number: found[number] for number in (1, 2, 3)} == dict.fromkeys((1, 2, 3), WAY | {("POST /v1/encode", "")})


def test_a_request_without_a_trace_or_with_nonsense_begins_one(recorded: InMemorySpanExporter) -> None:
    with live_gateway() as live, Caller(live.url) as caller:
        for header in ({}, {"traceparent": "nonsense"}):
            body = json.dumps({"items": [base64.b64encode(picture(1)).decode()]})
            assert caller.post("/v1/encode", body, JSON, header).status == 200
        made = finished(recorded, 2 * (len(WAY) + 1))
    assert list(ways(made).values()) == [WAY, WAY]


def test_no_span_is_made_outside_of_one(recorded: InMemorySpanExporter, pool: FakePool) -> None:
    assert all(outcome.error is None for outcome in client(pool).encode_many([picture(1)]))
    assert recorded.get_finished_spans() == ()


def test_without_a_provider_nothing_is_made_or_sent(pool: FakePool) -> None:
    batches = []
    answer = pool.answer
    pool.answer = lambda worker_id, batch: batches.append(batch) or answer(worker_id, batch)
    assert all(outcome.error is None for outcome in client(pool).encode_many([picture(1)]))
    assert [batch.traces for batch in batches] == [()]


def test_without_the_sdk_it_is_not_even_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "opentelemetry.sdk.trace")
    assert spans.current() == ""
    here = "00-" + "1" * 32 + "-" + "2" * 16 + "-01"
    with spans.SharedSpan("s", [here]) as below:
        assert below == ()
    assert spans.start("s", here) is None
    with spans.serving("s", here) as none:
        assert none is None
    assert "opentelemetry.sdk.trace" not in sys.modules


def test_a_collector_that_cannot_be_reached_for_want_of_a_package_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(spans.ENDPOINT, "http://localhost:4318")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    spans.set_up("test")
    assert "encpool[otel]" in caplog.text
