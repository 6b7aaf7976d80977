"""`encpool bench gateway`, on little."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster import EncoderPool
from cluster.benchmark.gateway import measure_beside, measure_memory, picture_bytes, table
from cluster.gateway.threaded import GatewayThread


def test_either_client_is_measured_and_told(
    gateway: GatewayThread,
    pool: EncoderPool,
    pictures: list[bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cluster.benchmark.gateway.ROUNDS", 2)
    file = tmp_path / "picture.png"
    file.write_bytes(pictures[0])
    beside = measure_beside(pool, gateway.url, file, cached=False, repeats=3, num_items=6, connections=2)
    assert min(beside.pool_ms, beside.http_ms, beside.pool_items_per_s, beside.http_items_per_s) > 0
    memory = measure_memory(gateway.url, file, connections=1, requests=10, num_looks=2)
    assert len(memory["own_bytes"]) == 2
    assert min(memory["own_bytes"]) > 2**20
    assert memory["requests"] == 10
    row = {"cached": False, "pool_ms": 10.0, "http_ms": 15.0, "pool_items_per_s": 50.0, "http_items_per_s": 45.0}
    text = table(
        {
            "model": "m",
            "num_workers": 2,
            "picture_bytes": 600_000,
            "connections": 64,
            "num_cpus": 2,
            "beside": [row | {"added": 0.5, "share": 0.9}],
            "memory": {"requests": 10_000, "own_bytes": [2**30] * 10},
        }
    )
    assert "+50%" in text
    assert "90%" in text
    assert "over 10,000 requests: 1024 1024" in text


def test_the_picture_has_600_kilobytes() -> None:
    assert 600_000 < len(picture_bytes()) < 605_000
