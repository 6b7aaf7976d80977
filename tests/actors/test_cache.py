"""A pool of two workers with caches: what was encoded once is found again, wherever it is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from fakes import tiny_config
from http_calls import Caller
from prometheus_client.parser import text_string_to_metric_families

from cluster import EncoderPool
from cluster.gateway.config import GatewayConfig
from cluster.gateway.item_maps import read_answer_item
from cluster.gateway.threaded import GatewayThread
from cluster.gateway.wire import as_float32
from cluster.lookup import Lookup
from cluster.streams.outcomes import Embedding, Outcome
from encoder.errors import WorkerStartError
from workers.cache_keys import content_digest

SavePicture = Callable[..., Path]
NUM_PICTURES = 12


@pytest.fixture(scope="module")
def pool(ray_cluster: None) -> Iterator[EncoderPool]:
    with EncoderPool.start(tiny_config(worker={"cache_bytes": "64MiB"})) as pool:
        yield pool


def pool_answer(outcome: Outcome) -> Embedding:
    assert outcome.embedding is not None, outcome.error
    return outcome.embedding


def wait_idle(pool: EncoderPool) -> None:
    limit_s = time.monotonic() + 30
    while any(member.num_leases for member in pool.members()):
        assert time.monotonic() < limit_s
        time.sleep(0.02)


def test_pictures_seen_before_are_hits_on_the_workers_that_have_them(
    pool: EncoderPool, save_picture: SavePicture
) -> None:
    paths = [save_picture(f"{number}.jpg", 200 + 8 * number, 160, seed=number) for number in range(NUM_PICTURES)]
    first = [pool_answer(outcome) for outcome in pool.encode_many(paths)]
    wait_idle(pool)  # the router has heard that nothing is under way: no backlog sends anything elsewhere
    again = [pool_answer(outcome) for outcome in pool.encode_many(paths)]
    assert not any(embedding.cached for embedding in first)
    assert len({embedding.worker for embedding in first}) > 1, "one worker alone proves no affinity"
    assert all(embedding.cached for embedding in again)
    assert [embedding.worker for embedding in again] == [embedding.worker for embedding in first]
    for one, other in zip(first, again, strict=True):
        assert torch.equal(one.tokens, other.tokens)
        assert len(other.tokens) == other.shape.num_tokens
        assert {"cache", "call", "total"} == other.timings.keys()
    stats = pool.stats().cache
    assert (stats.hits, stats.misses) == (NUM_PICTURES, NUM_PICTURES)
    assert stats.num_entries == NUM_PICTURES


def test_the_bytes_decide_not_the_path(pool: EncoderPool, save_picture: SavePicture) -> None:
    path = save_picture("one.png", 64, 64, seed=99)
    first = pool.encode(path)
    wait_idle(pool)
    second = pool.encode(path.read_bytes())
    assert (first.cached, second.cached) == (False, True)
    assert first.worker == second.worker


def test_the_pool_tells_prometheus_what_it_did(pool: EncoderPool, save_picture: SavePicture) -> None:
    path = save_picture("told.png", 80, 64, seed=98)
    for _ in range(2):
        pool.encode(path)
        wait_idle(pool)
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(pool.metrics()):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0) + sample.value
    stats = pool.stats()
    assert found["encpool_workers_leasable"] == 2
    assert found["encpool_items_total"] == stats.num_items
    assert found["encpool_segment_hits_total"] == stats.segment_hits > 0
    assert found["encpool_cache_items_total"] == stats.cache.hits + stats.cache.joins + stats.cache.misses > 0
    assert found["encpool_leases_to_cache_total"] >= 1
    assert found["encpool_leases_asked_total"] >= stats.num_items
    assert found["encpool_gpu_seconds_total"] > 0


def test_a_gateway_answers_from_the_caches(pool: EncoderPool, save_picture: SavePicture) -> None:
    picture = save_picture("asked-twice.jpg", 96, 64, seed=96).read_bytes()
    with GatewayThread(pool, GatewayConfig(port=0)) as gateway, Caller(gateway.url) as caller:
        before = pool.stats().cache.hits
        first = caller.msgpack(items=[picture])
        wait_idle(pool)
        again = caller.msgpack(items=[picture])
        assert first.statuses == again.statuses == [200]
        one, other = (read_answer_item(reply.items[0]).tokens for reply in (first, again))
        assert one is not None
        assert other is not None
        assert (as_float32(one) == as_float32(other)).all()
        assert pool.stats().cache.hits == before + 1
        text = caller.get("/metrics").body.decode()
    assert 'result="hit"' in text


def test_tokens_may_have_their_parts_of_the_caches_apart(
    pool: EncoderPool, save_picture: SavePicture, tmp_path: Path
) -> None:
    picture = save_picture("of-two-tenants.jpg", 88, 64, seed=95).read_bytes()
    tokens_file = tmp_path / "tokens"
    tokens_file.write_text("one 1111111111111111\nother 2222222222222222\n")
    config = GatewayConfig(port=0, tokens_file=tokens_file, cache_by_token=True)
    hits = []
    with GatewayThread(pool, config) as gateway:
        for token in ("1" * 16, "2" * 16, "1" * 16):
            with Caller(gateway.url, token) as caller:
                before = pool.stats().cache.hits
                assert caller.msgpack(items=[picture]).statuses == [200]
            wait_idle(pool)
            hits.append(pool.stats().cache.hits - before)
    assert hits[:2] == [0, 0]


def test_another_process_of_the_cluster_looks_up_by_digest(pool: EncoderPool, save_picture: SavePicture) -> None:
    data = save_picture("looked-up.png", 72, 64, seed=97).read_bytes()
    tokens = pool.encode(data).tokens
    lookup = Lookup.connect(pool.name, timeout_s=10)
    limit_s = time.monotonic() + 20
    while True:  # it is kept in the background
        found, missing = lookup.find([content_digest(data), content_digest(b"never seen")])
        if found is not None:
            break
        assert time.monotonic() < limit_s
        time.sleep(0.02)
    assert torch.equal(found, tokens)
    assert missing is None
    assert lookup.find([content_digest(data)], scope="somebody else's") == [None]
    with pytest.raises(WorkerStartError, match="no pool 'nowhere'"):
        Lookup.connect("nowhere")
