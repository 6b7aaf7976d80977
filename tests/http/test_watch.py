"""What people and Prometheus see of a gateway: the live page in a browser, the metrics, the documents."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from http_calls import Caller

from cluster import EncoderPool
from cluster.gateway.config import GatewayConfig
from cluster.gateway.threaded import GatewayThread

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def test_prometheus_reads_the_pool_and_the_gateway(caller: Caller, pictures: list[bytes]) -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    caller.msgpack(items=[pictures[0], b"broken"])
    reply = caller.get("/metrics")
    assert reply.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    samples = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in parser.text_string_to_metric_families(reply.body.decode())
        for sample in family.samples
    }
    route = ("route", "/v1/encode")
    assert samples["encpool_http_requests_total", route, ("status", "207")] >= 1
    assert samples["encpool_http_seconds_count", route] >= 1
    assert samples["encpool_http_items_total", ("status", "422")] >= 1
    assert samples["encpool_http_sent_bytes_total",] > 0
    assert samples["encpool_http_in_flight",] == 0
    assert samples["encpool_workers_leasable",] == 2
    assert any(name == "encpool_segment_hits_total" for name, *_ in samples)


def test_the_numbers_of_the_page_are_those_of_the_pool(
    caller: Caller, pool: EncoderPool, pictures: list[bytes]
) -> None:
    caller.msgpack(items=[*pictures, b"broken"])
    time.sleep(1.1)  # an answer that is asked for again within a second is the same
    stats = caller.get("/v1/stats").value
    assert (stats["state"], stats["model"]) == ("ok", "tiny-minicpmv-2.6")
    assert stats["requests"]["num_requests"] >= 1
    assert 0 < stats["requests"]["p50_ms"] <= stats["requests"]["p99_ms"]
    assert stats["errors"][0]["type"] == "BadMediaError"
    found = stats["pool"]
    assert (found["num_workers"], found["num_ready"]) == (2, 2)
    assert found["num_items"] == pool.stats().num_items
    names = [column["name"] for column in found["columns"]]
    assert names == sorted(names, key=lambda name: int(name.rpartition("/")[2]))
    hits = sum(cell["hits"] for worker in found["workers"] for cell in worker["cells"].values())
    assert hits == pool.stats().segment_hits > 0


def dump(url: str, *options: str) -> str:
    """The page's document after its script has run for some seconds."""
    command = [str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", *options]
    command += ["--virtual-time-budget=5000", "--dump-dom", url]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=100).stdout


@pytest.mark.timeout(240)
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_the_live_page_draws_the_pool_in_a_browser(
    gateway: GatewayThread, caller: Caller, pictures: list[bytes], tmp_path: Path
) -> None:
    caller.msgpack(items=[*pictures, b"<script>alert(1)</script>"])
    time.sleep(1.1)
    document = dump(f"{gateway.url}/", f"--user-data-dir={tmp_path}")
    assert 'data-ready="yes"' in document
    text = re.sub(r"<script>.*</script>", "", document, flags=re.DOTALL)
    for said in ("tiny-minicpmv-2.6", ">worker-0<", ">worker-1<", "image: packed", "BadMediaError", "2/2"):
        assert said in text, said
    cells = re.findall(r"<td[^>]*rgba\(var\(--heat\), [^>]*>([^<]+)<", text)
    assert cells, "no cell of the heat map is warm"
    assert all(re.fullmatch(r"\d+k?|\d+\.\dM", cell) for cell in cells)


def test_pages_need_nothing_from_elsewhere_and_run_nothing_foreign(caller: Caller) -> None:
    for path in ("/", "/docs"):
        reply = caller.get(path)
        assert reply.headers["Content-Type"].startswith("text/html")
        assert "default-src 'none'" in reply.headers["Content-Security-Policy"]
        assert not re.findall(rb"(?:src|href)=[\"'](?:https?:)?//", reply.body)
    assert b"POST /v1/encode" in caller.get("/docs").body


def test_the_description_names_every_route_and_what_a_request_may_say(caller: Caller) -> None:
    document = caller.get("/openapi.json").value
    assert document["openapi"] == "3.1.0"
    for path, methods in document["paths"].items():
        for method in methods:
            reply = caller.get(path) if method == "get" else caller.post(path, b"x", "text/plain")
            assert reply.status in (200, 415), path
    asked = document["paths"]["/v1/encode"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"items", "model", "timeout_s", "priority", "stream", "encoding", "v"} == asked["properties"].keys()
    also = document["paths"]["/v1/embeddings"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    for fields in (asked["properties"], also["properties"]):
        assert all(field.get("description") for field in fields.values())


def test_watching_needs_a_token_that_may(pool: EncoderPool, tmp_path: Path) -> None:
    tokens_file = tmp_path / "tokens"
    tokens_file.write_text("app 0123456789abcdef-app encode\nprom 0123456789abcdef-prom watch\n")
    with GatewayThread(pool, GatewayConfig(port=0, tokens_file=tokens_file)) as gateway:
        for token, status in ((None, 401), ("0123456789abcdef-app", 403), ("0123456789abcdef-prom", 200)):
            with Caller(gateway.url, token) as caller:
                assert caller.get("/metrics").status == caller.get("/v1/stats").status == status
        with Caller(gateway.url) as caller:
            assert [caller.get(path).status for path in ("/", "/docs", "/openapi.json", "/health")] == [200] * 4
