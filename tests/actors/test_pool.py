"""A real pool on a local Ray: two CPU workers, a small model, and things that go wrong."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import ray
import torch
from fakes import tiny_config
from safetensors.torch import save_file

from cluster import EncoderPool
from cluster.cli import main
from cluster.client import Client
from cluster.routing.leases import Lease, LeaseRequest
from cluster.streams.outcomes import Outcome
from encoder.adapters.registry import load_adapter
from encoder.errors import (
    BadMediaError,
    ConfigError,
    PoolClosedError,
    PoolSaturatedError,
    WeightsError,
    WorkerLostError,
    WorkerStartError,
)
from encoder.media import decode_image
from encoder.runner import EncoderRunner
from workers.messages import WorkerState
from workers.priority import Priority

SavePicture = Callable[..., Path]
SIZES = [(640, 480), (224, 224), (100, 700), (1000, 300), (336, 336), (90, 40)]


@pytest.fixture(scope="session")
def reference() -> Callable[[bytes], torch.Tensor]:
    """Tokens of one image as a plain runner gives them, in this process and without Ray."""
    config = tiny_config().worker.encoder.model_copy(update={"graphs": False})
    runner = EncoderRunner.from_config(config, "cpu")

    def encode(data: bytes) -> torch.Tensor:
        image = decode_image(data, max_pixels=config.max_pixels, max_bytes=config.max_bytes)
        return torch.cat(runner.encode(runner.adapter.prepare(image)))

    return encode


@pytest.fixture
def folder(save_picture: SavePicture) -> list[Path]:
    """Pictures of several sizes and formats."""
    suffixes = ["jpg", "png", "webp", "bmp"]
    return [
        save_picture(f"{number}.{suffixes[number % 4]}", *SIZES[number % len(SIZES)], seed=number)
        for number in range(24)
    ]


def wait_for_both(pool: EncoderPool) -> None:
    limit_s = time.monotonic() + 60
    while pool.stats().num_ready < 2:
        assert time.monotonic() < limit_s, "the worker did not come back"
        time.sleep(0.1)


def test_a_path_and_its_bytes_are_encoded_as_the_runner_does(
    pool: EncoderPool, folder: list[Path], reference: Callable[[bytes], torch.Tensor]
) -> None:
    data = folder[0].read_bytes()
    for source in (folder[0], str(folder[0]), data):
        embedding = pool.encode(source)
        torch.testing.assert_close(embedding.tokens, reference(data), rtol=1e-5, atol=1e-5)
        assert len(embedding.tokens) == embedding.shape.num_tokens
        assert embedding.graphs
        assert embedding.worker.startswith("worker-")
        assert {"decode", "wait", "replay", "call", "total"} == embedding.timings.keys()


def test_large_pictures_and_their_tokens_go_through_memory_that_the_client_lends(
    pool: EncoderPool, save_picture: SavePicture, reference: Callable[[bytes], torch.Tensor]
) -> None:
    data = save_picture("large.png", 1344, 896).read_bytes()
    slabs = pool.client.transport._slabs  # type: ignore[attr-defined]
    for worker in ("worker-0", "worker-1"):
        slabs.forget(worker)
    tokens = [pool.encode(data).tokens for _ in range(6)]
    assert max(slabs._reach.values()) == 4, "float32 of a CPU"
    assert slabs.num_bytes > 0
    for tokens_TE in tokens:
        torch.testing.assert_close(tokens_TE, reference(data), rtol=1e-5, atol=1e-5)


def test_a_mixed_folder_comes_back_right_and_in_order_though_a_worker_is_killed(
    pool: EncoderPool, folder: list[Path], reference: Callable[[bytes], torch.Tensor]
) -> None:
    broken = folder[7].with_name("broken.jpg")
    broken.write_bytes(folder[0].read_bytes()[:3000])
    sources = [*folder[:7], broken, *folder[7:]]
    victim = max(pool.stats().reports, key=lambda report: report.worker_id)
    outcomes: list[Outcome] = []
    for outcome in pool.encode_many(sources):
        outcomes.append(outcome)
        if len(outcomes) == 2:
            os.kill(victim.pid, signal.SIGKILL)
    assert [outcome.source for outcome in outcomes] == sources
    assert isinstance(outcomes[7].error, BadMediaError)
    for source, outcome in zip(sources, outcomes, strict=True):
        if source is not broken:
            assert outcome.embedding is not None, outcome.error
            expected = reference(source.read_bytes())
            torch.testing.assert_close(outcome.embedding.tokens, expected, rtol=1e-5, atol=1e-5)
    limit_s = time.monotonic() + 60
    while len(reports := pool.stats().reports) < 2 or victim.incarnation in {report.incarnation for report in reports}:
        assert time.monotonic() < limit_s, "the worker did not come back"
        time.sleep(0.1)
    assert {report.worker_id for report in reports} == {"worker-0", "worker-1"}
    wait_for_both(pool)


def test_closing_a_stream_early_leaves_an_idle_pool(pool: EncoderPool, folder: list[Path]) -> None:
    stream = pool.encode_many(folder * 4)
    assert next(stream).embedding is not None
    stream.close()
    limit_s = time.monotonic() + 20
    while any(report.backlog_ms or report.num_waiting for report in pool.stats().reports) or any(
        member.num_leases for member in pool.members()
    ):
        assert time.monotonic() < limit_s, "cancelled work stays in the pool"
        time.sleep(0.05)
    assert pool.encode(folder[1]).tokens.isfinite().all()


def test_a_single_path_is_no_list_of_sources(pool: EncoderPool, folder: list[Path]) -> None:
    for source in (folder[0], str(folder[0]), b"bytes"):
        with pytest.raises(TypeError, match="encode takes a single one"):
            pool.encode_many(source)  # type: ignore[arg-type]


def test_stats_count_what_ran(pool: EncoderPool, folder: list[Path]) -> None:
    wait_for_both(pool)
    before = pool.stats()
    assert all(outcome.error is None for outcome in pool.encode_many(iter(folder[:8])))
    stats = pool.stats()
    assert stats.num_items - before.num_items == 8
    assert (stats.num_workers, stats.num_ready, stats.hit_rate) == (2, 2, 1.0)
    assert 0.3 < stats.fill <= 1.0
    assert {report.state for report in stats.reports} == {WorkerState.READY}


def test_a_full_pool_refuses_with_a_hint_and_a_patient_client_rides_it_out(
    pool: EncoderPool, folder: list[Path]
) -> None:
    wait_for_both(pool)
    patient = pool.client
    request = LeaseRequest(shape=patient.read(folder[0])[2])
    others = [lease for lease in patient.assign([request] * 2000, Priority.INTERACTIVE) if isinstance(lease, Lease)]
    config = pool.config.model_copy(update={"saturated_timeout_s": 0.0})
    hasty = Client(config, patient.adapter, patient.transport, num_workers=patient.num_workers)
    with pytest.raises(PoolSaturatedError, match=r"all 2 workers are full; retry in \d+ ms"):
        hasty.encode(folder[0])
    end = threading.Timer(0.5, patient.transport.release, args=[[lease.lease_id for lease in others]])
    end.start()
    started_s = time.monotonic()
    assert pool.encode(folder[0]).graphs
    assert time.monotonic() - started_s > 0.4
    end.join()


def test_a_configuration_file_is_read_by_its_path(tmp_path: Path) -> None:
    file = tmp_path / "pool.yaml"
    file.write_text("num_workers: 1\nworker: {encoder: {model: tiny-minicpmw-2.6}}\n")
    with pytest.raises(ConfigError, match="did you mean 'tiny-minicpmv-2"):
        EncoderPool.start(file)


def test_a_cluster_without_a_standing_pool_is_told_like_no_cluster_at_all(
    ray_cluster: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status"]) == 1
    assert "no pool is running here" in capsys.readouterr().err


def test_an_unknown_model_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match=r"no model 'tiny-minicpmv-9': .* did you mean 'tiny-minicpmv-"):
        EncoderPool.start(tiny_config(model="tiny-minicpmv-9"))


def test_a_worker_that_cannot_load_fails_the_start_with_its_reason(ray_cluster: None, tmp_path: Path) -> None:
    adapter = load_adapter(tiny_config().worker.encoder)
    (tmp_path / "config.json").write_text(json.dumps(adapter.checkpoint_config()))
    save_file({name: torch.zeros(1) for name in adapter.weight_shapes()}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"worker-0 could not start: WeightsError: .*another shape"):
        EncoderPool.start(tiny_config(model=str(tmp_path), num_workers=1))


def test_resources_that_the_cluster_lacks_fail_the_start_at_once(ray_cluster: None) -> None:
    with pytest.raises(WorkerStartError, match="2 workers need a GPU each, the cluster has 0"):
        EncoderPool.start(tiny_config(worker={"device": "cuda"}))
    with pytest.raises(WorkerStartError, match="workers need 400 CPUs"):
        EncoderPool.start(tiny_config(num_workers=800))


def test_a_stuck_worker_loses_its_items_to_another(pool: EncoderPool, folder: list[Path]) -> None:
    wait_for_both(pool)
    config = pool.config.model_copy(update={"call_timeout_s": 2.0})
    hasty = Client(config, pool.client.adapter, pool.client.transport, num_workers=lambda: 2)
    victim = min(pool.stats().reports, key=lambda report: report.worker_id)
    os.kill(victim.pid, signal.SIGSTOP)
    try:
        outcomes = list(hasty.encode_many(folder[:12]))
    finally:
        os.kill(victim.pid, signal.SIGCONT)
    assert {outcome.embedding and outcome.embedding.worker for outcome in outcomes} == {"worker-1"}
    wait_for_both(pool)
    assert victim.incarnation in {report.incarnation for report in pool.stats().reports}


def test_a_killed_router_comes_back_and_learns_from_the_workers(pool: EncoderPool, folder: list[Path]) -> None:
    wait_for_both(pool)
    ray.kill(pool._router, no_restart=False)
    assert pool.encode(folder[0]).graphs
    wait_for_both(pool)
    assert pool.stats().num_ready == 2


def test_a_pool_that_closes_ends_its_streams_and_leaves_other_pools_alone(
    pool: EncoderPool, folder: list[Path]
) -> None:
    second = EncoderPool.start(tiny_config(num_workers=1))
    ends: list[BaseException] = []
    outcomes: list[Outcome] = []

    def encode() -> None:
        try:
            outcomes.extend(second.encode_many(folder * 20))
        except PoolClosedError as error:
            ends.append(error)

    thread = threading.Thread(target=encode)
    thread.start()
    time.sleep(0.5)
    second.close()
    thread.join(10)
    assert len(ends) == 1
    for late in (second.stats, second.members, lambda: second.encode(folder[0])):
        with pytest.raises(PoolClosedError):
            late()
    assert pool.encode(folder[0]).graphs


def test_a_stuck_router_is_a_typed_error(pool: EncoderPool, monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for_both(pool)
    pid = ray.get(pool._router.__ray_call__.remote(lambda router: os.getpid()))
    monkeypatch.setattr("cluster.pool.ROUTER_TIMEOUT_S", 0.3)
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(WorkerLostError, match="the router does not answer"):
            pool.stats()
    finally:
        os.kill(pid, signal.SIGCONT)


def test_many_threads_share_a_pool(pool: EncoderPool, folder: list[Path]) -> None:
    wait_for_both(pool)
    with ThreadPoolExecutor(8) as threads:
        embeddings = list(threads.map(pool.encode, folder[:16]))
    again = [outcome.embedding for outcome in pool.encode_many(folder[:16])]
    for first, second in zip(embeddings, again, strict=True):
        assert second is not None
        torch.testing.assert_close(first.tokens, second.tokens, rtol=1e-5, atol=1e-5)
    assert {embedding.worker for embedding in embeddings} == {"worker-0", "worker-1"}
