"""A pool of three workers with caches: what was encoded once is found again, wherever it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from fakes import tiny_config

from cluster import EncoderPool

SavePicture = Callable[..., Path]
NUM_PICTURES = 12


@pytest.fixture(scope="module")
def pool(ray_cluster: None) -> Iterator[EncoderPool]:
    with EncoderPool.start(tiny_config(num_workers=3, worker={"cache_bytes": "64MiB"})) as pool:
        yield pool


def test_pictures_seen_before_are_hits_on_the_workers_that_have_them(
    pool: EncoderPool, save_picture: SavePicture
) -> None:
    paths = [save_picture(f"{number}.jpg", 200 + 8 * number, 160, seed=number) for number in range(NUM_PICTURES)]
    rounds = [[outcome.embedding for outcome in pool.encode_many(paths)] for _ in range(2)]
    first, again = ([embedding for embedding in round if embedding is not None] for round in rounds)
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
    second = pool.encode(path.read_bytes())
    assert (first.cached, second.cached) == (False, True)
    assert first.worker == second.worker
