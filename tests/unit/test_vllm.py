"""The hand-off to vLLM: content parts as its chat parser reads them, and the connector behind its own interface."""

from __future__ import annotations

import base64
import inspect
import io
import pickle
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import vllm_interface
from fakes import Clock, FakeRunner, batch, loader, picture, until

from cluster.streams.outcomes import Embedding
from cluster.vllm import to_vllm
from encoder.adapters.registry import load_adapter
from encoder.config import EncoderConfig
from encoder.errors import EncodeError
from encoder.media import probe_header
from encoder.types import ItemShape
from workers.cache_keys import content_digest
from workers.config import WorkerConfig
from workers.worker import EncoderWorker

PICTURE = picture(7, width=700, height=300)


def loaded(text: str) -> torch.Tensor:
    """A tensor as vLLM's embedding reader loads it."""
    tensor: torch.Tensor = torch.load(io.BytesIO(base64.b64decode(text, validate=True)), weights_only=True)
    return tensor


def embedding_of(model: str, encoded: bytes) -> Embedding:
    adapter = load_adapter(EncoderConfig(model=model))
    shape = adapter.probe(probe_header(encoded, max_pixels=10**9, max_bytes=10**9))
    tokens = torch.randn(shape.num_tokens, adapter.hidden_size, generator=torch.Generator().manual_seed(0))
    return Embedding(tokens=tokens.bfloat16(), shape=shape, graphs=(), misses=(), timings={}, note=None, worker="w")


# --- content parts ---


def test_minicpmv_gets_rows_and_the_size_of_the_picture() -> None:
    embedding = embedding_of("tiny-minicpmv-2.6", PICTURE)
    part = to_vllm(embedding, PICTURE, model="tiny-minicpmv-2.6")
    assert part["type"] == "image_embeds"
    assert part["uuid"] == content_digest(PICTURE).hex()
    body = part["image_embeds"]
    assert body.keys() == {"image_embeds", "image_sizes"}
    assert torch.equal(loaded(body["image_embeds"]), embedding.tokens)
    assert loaded(body["image_sizes"]).tolist() == [700, 300]
    # One item a part: vLLM stacks the parts, so each size is (2,) and the rows of one item are 2-D.
    assert torch.stack([loaded(body["image_sizes"])] * 2).shape == (2, 2)


@pytest.mark.parametrize("model", ["tiny-qwen2-vl", "tiny-qwen2.5-vl", "tiny-qwen3-vl", "tiny-qwen3-vl-moe"])
def test_the_qwen_line_gets_rows_and_the_grid_that_gives_their_number(model: str) -> None:
    embedding = embedding_of(model, PICTURE)
    body = to_vllm(embedding, PICTURE, model=model)["image_embeds"]
    assert body.keys() == {"image_embeds", "image_grid_thw"}
    grid = loaded(body["image_grid_thw"])
    assert grid.shape == (3,)
    merge = 2
    assert int(torch.stack([grid]).prod(-1)) // merge // merge == len(loaded(body["image_embeds"]))


def test_other_models_get_rows_alone() -> None:
    embedding = embedding_of("tiny-gemma3", PICTURE)
    assert torch.equal(loaded(to_vllm(embedding, PICTURE, model="tiny-gemma3")["image_embeds"]), embedding.tokens)


def test_a_clip_or_rows_of_another_number_are_refused() -> None:
    embedding = embedding_of("tiny-qwen2-vl", PICTURE)
    clip = ItemShape(grids=embedding.shape.grids * 2, num_patches=1, num_tokens=len(embedding.tokens))
    with pytest.raises(EncodeError, match="one grid of one frame, got 2"):
        to_vllm(replaced(embedding, shape=clip), PICTURE, model="tiny-qwen2-vl")
    with pytest.raises(EncodeError, match="tokens, width"):
        to_vllm(replaced(embedding, tokens=embedding.tokens[1:]), PICTURE, model="tiny-qwen2-vl")


def replaced(embedding: Embedding, **changes: Any) -> Embedding:
    return Embedding(**{name: getattr(embedding, name) for name in embedding.__slots__} | changes)


# --- the worker's look-up ---


def test_a_worker_finds_what_it_kept_by_content_and_scope() -> None:
    config = WorkerConfig.model_validate(
        {"encoder": EncoderConfig(model="fake"), "device": "cpu", "decode_threads": 1, "cache_bytes": 2**20}
    )
    worker = EncoderWorker(config, "w", load=loader(FakeRunner()))
    worker.start()
    worker.wait_started(20)
    worker.encode(batch(picture(7), picture(9, width=300)))
    until(lambda: worker.report().stats.cache.num_entries == 2)
    wanted = [content_digest(picture(brightness, width)) for brightness, width in [(9, 300), (8, 100), (7, 100)]]
    result = worker.find(wanted)
    assert [item.cached for item in result.items] == [True, False, True]
    assert result.tokens_TE[:, 0].tolist() == [9.0] * 6 + [7.0] * 2
    assert not any(item.cached for item in worker.find(wanted, scope="other").items)
    assert worker.report().stats.num_items == 2, "looking up is no item"
    worker.close()


# --- the connector ---


class Shelf:
    """Rows by digest, in place of a pool; counts how often it was asked."""

    def __init__(self, **rows_TE: torch.Tensor) -> None:
        self.rows_TE = {bytes.fromhex(name[1:]): rows for name, rows in rows_TE.items()}
        self.num_asked = 0

    def find(self, digests: Sequence[bytes], *, scope: str = "") -> list[torch.Tensor | None]:
        self.num_asked += 1
        assert scope == "tenant"
        return [self.rows_TE.get(digest) for digest in digests]


NAME = content_digest(PICTURE).hex()


def request(identifier: str, num_rows: int) -> Any:
    return SimpleNamespace(
        mm_features=[SimpleNamespace(identifier=identifier)], get_num_encoder_embeds=lambda index: num_rows
    )


BASE = "vllm.distributed.ec_transfer.ec_connector.base"


@pytest.fixture(params=["as far as it is used", "as it is installed"])
def connector_module(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The connector, over vLLM's interface: what it uses of it, written down here, and vLLM's own."""
    if request.param == "as it is installed":
        pytest.importorskip(BASE, reason="vLLM is not installed")
        platforms = vllm_interface.modules()["vllm.platforms"]  # a device is not to be had of one built for GPUs
        monkeypatch.setattr("vllm.platforms.current_platform", vars(platforms)["current_platform"], raising=False)
    else:
        for name, module in vllm_interface.modules().items():
            monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "cluster.vllm_ec_connector", raising=False)
    yield import_module("cluster.vllm_ec_connector")
    sys.modules.pop("cluster.vllm_ec_connector", None)


def both_sides(module: ModuleType, shelf: Shelf, clock: Clock | None = None) -> tuple[Any, Any]:
    config = vllm_interface.config(scope="tenant")
    roles = module.ECConnectorRole
    scheduler = module.EncpoolECConnector(config, roles.SCHEDULER, find=shelf, now_s=clock or Clock())
    return scheduler, module.EncpoolECConnector(config, roles.WORKER)


def test_rows_reach_the_encoder_cache_under_vllms_name(connector_module: ModuleType) -> None:
    rows_TE = torch.randn(5, 8)
    scheduler, worker = both_sides(connector_module, shelf := Shelf(**{f"x{NAME}": rows_TE}))
    assert scheduler.has_cache_item(NAME)
    shelf.rows_TE.clear()  # evicted in between: no promise is broken
    scheduler.update_state_after_alloc(request(NAME, 5), 0)
    metadata = pickle.loads(pickle.dumps(scheduler.build_connector_meta(None)))
    worker.bind_connector_metadata(metadata)
    encoder_cache: dict[str, torch.Tensor] = {}
    worker.start_load_caches(encoder_cache)
    assert encoder_cache[NAME].dtype == torch.bfloat16, "vLLM's dtype"
    torch.testing.assert_close(encoder_cache[NAME].float(), rows_TE, rtol=1e-2, atol=1e-2)
    assert not scheduler.build_connector_meta(None).rows_TE, "a step's metadata carries its own rows alone"


def test_what_vllm_has_already_stays(connector_module: ModuleType) -> None:
    scheduler, worker = both_sides(connector_module, Shelf(**{f"x{NAME}": torch.ones(5, 8)}))
    scheduler.update_state_after_alloc(request(NAME, 5), 0)
    worker.bind_connector_metadata(scheduler.build_connector_meta(None))
    encoder_cache = {NAME: torch.zeros(5, 8)}
    worker.start_load_caches(encoder_cache)
    assert encoder_cache[NAME].sum() == 0


def test_what_the_pool_lacks_is_asked_for_again_after_a_second(connector_module: ModuleType) -> None:
    scheduler, _ = both_sides(connector_module, shelf := Shelf(), clock := Clock())
    assert not scheduler.has_cache_item(NAME)
    assert not scheduler.has_cache_item(NAME)
    assert shelf.num_asked == 1
    clock.now += 1.1
    shelf.rows_TE[bytes.fromhex(NAME)] = torch.ones(5, 8)
    assert scheduler.has_cache_item(NAME)


def test_vllms_own_hashes_are_not_asked_for(connector_module: ModuleType) -> None:
    scheduler, _ = both_sides(connector_module, shelf := Shelf())
    for identifier in ("f" * 64, "sku-1234-a", "z" * 32):
        assert not scheduler.has_cache_item(identifier)
    assert shelf.num_asked == 0


def test_rows_of_another_number_are_an_error_that_says_why(connector_module: ModuleType) -> None:
    scheduler, _ = both_sides(connector_module, Shelf(**{f"x{NAME}": torch.ones(5, 8)}))
    with pytest.raises(EncodeError, match=r"5 rows .* expects 6; give both the same"):
        scheduler.update_state_after_alloc(request(NAME, 6), 0)


def test_rows_of_another_number_than_a_request_needs_are_not_there(
    connector_module: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler, _ = both_sides(connector_module, shelf := Shelf(**{f"x{NAME}": torch.ones(5, 8)}))
    assert scheduler.ensure_cache_available(request(NAME, 6), 0), "nothing is ever in transit"
    assert shelf.num_asked == 0, "vLLM may have it"
    assert not scheduler.has_cache_item(NAME), "vLLM encodes it itself"
    assert "5 rows" in caplog.text
    scheduler.update_state_after_alloc(request(NAME, 6), 0)  # as vLLM does for what it encodes itself
    assert not scheduler.build_connector_meta(None).rows_TE
    other, _ = both_sides(connector_module, Shelf(**{f"x{NAME}": torch.ones(5, 8)}))
    assert other.ensure_cache_available(request(NAME, 5), 0)
    assert other.has_cache_item(NAME)


def test_few_rows_are_held_for_requests_that_never_come(connector_module: ModuleType) -> None:
    names = [content_digest(bytes([number % 256, number // 256])).hex() for number in range(300)]
    scheduler, _ = both_sides(connector_module, Shelf(**{f"x{name}": torch.ones(1, 8) for name in names}))
    assert all(scheduler.has_cache_item(name) for name in names)
    assert len(scheduler._held_TE) == connector_module.MAX_HELD


def test_it_implements_the_interface_of_the_vllm_installed_here() -> None:
    base = pytest.importorskip(BASE, reason="vLLM is not installed")
    connector = import_module("cluster.vllm_ec_connector").EncpoolECConnector
    assert not connector.__abstractmethods__
    asked = SimpleNamespace(ec_connector="EncpoolECConnector", ec_connector_module_path="cluster.vllm_ec_connector")
    factory = import_module("vllm.distributed.ec_transfer.ec_connector.factory").ECConnectorFactory
    assert factory.get_connector_class(asked) is connector
    for name in base.ECConnectorBase.__abstractmethods__ | {"ensure_cache_available"}:
        if not hasattr(base.ECConnectorBase, name):
            continue
        theirs, ours = (
            inspect.signature(getattr(base.ECConnectorBase, name)),
            inspect.signature(getattr(connector, name)),
        )
        assert list(ours.parameters) == list(theirs.parameters), name
