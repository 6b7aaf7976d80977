"""What is kept, under which name, and what goes when there is no more room."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from encoder.config import EncoderConfig
from encoder.runner import EncoderRunner
from encoder.types import ItemShape
from encoder.weights import weights_digest
from workers.cache import OVERHEAD_BYTES, EmbeddingCache
from workers.cache_keys import (
    NEUTRAL,
    RESOLVED,
    content_digest,
    embedding_key,
    encoder_fingerprint,
    framed_digest,
    runner_fingerprint,
    short_digest,
)

ROW_BYTES = 1000
SIZE = OVERHEAD_BYTES + ROW_BYTES  # of an entry of one row


def shape(num_tokens: int = 1) -> ItemShape:
    return ItemShape(grids=((1, 4, num_tokens),), num_patches=4 * num_tokens, num_tokens=num_tokens)


def rows(num_tokens: int = 1, value: float = 0.0) -> torch.Tensor:
    return torch.full((num_tokens, ROW_BYTES // 4), value)


def kept(cache: EmbeddingCache, keys: str) -> str:
    """Which of the keys are there; does not count as a use."""
    return "".join(key for key in keys if key.encode() in cache._entries)


def filled(keys: str, *, room: int, cost_ms: float = 10.0) -> EmbeddingCache:
    cache = EmbeddingCache(room * SIZE)
    for key in keys:
        cache.put(key.encode(), rows(), shape(), cost_ms=cost_ms)
    return cache


# --- keys ---

PLAIN = EncoderConfig(model="m")


def fingerprint(
    settings: EncoderConfig = PLAIN,
    *,
    encoder_id: str = "m@bfloat16",
    config: dict[str, int] | None = None,
    weights: bytes = b"",
) -> bytes:
    return encoder_fingerprint(
        settings, encoder_id=encoder_id, checkpoint_config=config or {"width": 64}, weights_digest=weights
    )


@pytest.mark.filterwarnings("ignore:Pydantic serializer")
@pytest.mark.parametrize("name", sorted(EncoderConfig.model_fields))
def test_a_setting_changes_the_key_unless_it_is_known_to_leave_the_numbers_alone(name: str) -> None:
    changed = fingerprint(PLAIN.model_copy(update={name: "another value"}))
    assert (changed == fingerprint()) == (name in NEUTRAL | RESOLVED)


def test_what_is_known_to_be_neutral_are_settings() -> None:
    assert EncoderConfig.model_fields.keys() >= NEUTRAL | RESOLVED


def test_dtype_precision_architecture_and_weights_change_the_key() -> None:
    others = [
        fingerprint(encoder_id="m@float32"),
        fingerprint(encoder_id="m@bfloat16+fp8"),
        fingerprint(encoder_id="n@bfloat16"),
        fingerprint(config={"width": 65}),
        fingerprint(weights=b"tuned"),
    ]
    assert len({*others, fingerprint()}) == 6


def test_content_scope_modality_and_an_items_own_options_change_the_key() -> None:
    def key(
        content: bytes = b"c", scope: str = "", modality: str = "image", options: dict[str, object] | None = None
    ) -> bytes:
        return embedding_key(content, fingerprint=b"f", scope=scope, modality=modality, options=options)

    keys = [key(), key(b"d"), key(scope="a"), key(modality="video"), key(options={"fps": 1}), key(options={"fps": 2})]
    assert len(set(keys)) == len(keys)
    assert key(options={"a": 1, "b": 2}) == key(options={"b": 2, "a": 1})
    assert {len(key) for key in keys} == {16}


@given(st.lists(st.binary(max_size=4), max_size=4), st.lists(st.binary(max_size=4), max_size=4))
def test_no_two_lists_of_fields_run_together(one: list[bytes], other: list[bytes]) -> None:
    assert (framed_digest(*one) == framed_digest(*other)) == (one == other)


def test_a_content_digest_has_128_bits_and_a_short_one_64() -> None:
    digest = content_digest(b"picture")
    assert len(digest) == 16
    assert short_digest(digest) == int.from_bytes(digest[:8], "big")
    assert content_digest(memoryview(b"picture")) == digest


def test_runners_of_other_layouts_share_keys_and_those_of_other_numbers_do_not() -> None:
    def of(**settings: object) -> bytes:
        config = EncoderConfig.model_validate({"model": "tiny-minicpmv-2.6", **settings})
        return runner_fingerprint(EncoderRunner.from_config(config, "cpu"))

    assert of() == of(dtype="float32", layouts=("24x43",), graphs=False) != of(dtype="bfloat16")
    assert of() != of(seed=1)


def test_one_changed_tensor_changes_the_digest_of_a_checkpoint(tmp_path: Path) -> None:
    shard = tmp_path / "model-00001-of-00001.safetensors"
    shard.write_bytes(bytes(1_000_000))
    before = weights_digest(tmp_path)
    assert weights_digest(tmp_path) == before
    shard.write_bytes(bytes(500_000) + b"\1" * 100_000 + bytes(400_000))
    assert weights_digest(tmp_path) != before
    (tmp_path / "config.json").write_text(json.dumps({}))
    assert weights_digest(None) == b""


# --- keeping ---


def test_tokens_come_back_and_are_counted() -> None:
    cache = EmbeddingCache(10 * SIZE)
    assert cache.get(b"a", shape()) is None
    cache.put(b"a", rows(value=7.0), shape(), cost_ms=10)
    found = cache.get(b"a", shape())
    assert found is not None
    assert found.unique().tolist() == [7.0]
    stats = cache.stats()
    assert (stats.hits, stats.misses, stats.num_entries, stats.used_bytes) == (1, 1, 1, SIZE)
    assert stats.hit_rate == 0.5


def test_tokens_of_another_count_or_grid_are_no_hit_and_go() -> None:
    cache = EmbeddingCache(10 * SIZE)
    for wrong in (shape(2), ItemShape(grids=((1, 2, 2),), num_patches=4, num_tokens=1)):
        cache.put(b"a", rows(), shape(), cost_ms=10)
        assert cache.get(b"a", wrong) is None
        assert cache.get(b"a", shape()) is None
    assert cache.stats().mismatches == 2
    assert cache.stats().used_bytes == 0


def test_among_equals_the_least_recently_used_goes() -> None:
    cache = filled("abc", room=3)
    cache.put(b"d", rows(), shape(), cost_ms=10)
    assert kept(cache, "abcd") == "bcd"
    for key in (b"c", b"d", b"b"):  # each once: equal again
        cache.get(key, shape())
    cache.put(b"e", rows(), shape(), cost_ms=1e6)
    assert kept(cache, "abcde") == "bde"


def test_what_is_dear_or_often_asked_for_stays() -> None:
    cache = filled("ab", room=3)
    cache.put(b"D", rows(), shape(), cost_ms=1000)
    for _ in range(3):
        cache.get(b"a", shape())
    cache.put(b"c", rows(), shape(), cost_ms=10)
    assert kept(cache, "abcD") == "acD"


def test_a_large_entry_has_to_be_worth_its_bytes() -> None:
    cache = EmbeddingCache(5 * SIZE)
    cache.put(b"L", rows(4), shape(4), cost_ms=20)
    cache.put(b"a", rows(), shape(), cost_ms=10)
    cache.put(b"b", rows(), shape(), cost_ms=10)
    cache.put(b"c", rows(), shape(), cost_ms=10)
    assert kept(cache, "Labc") == "abc"


def test_what_was_hot_once_is_overtaken() -> None:
    cache = filled("h", room=3)
    for _ in range(20):
        cache.get(b"h", shape())
    for number in range(200):
        cache.put(f"n{number}".encode(), rows(), shape(), cost_ms=10)
    assert kept(cache, "h") == ""


def test_what_is_larger_than_the_cache_is_not_kept_and_evicts_nothing() -> None:
    cache = filled("ab", room=2)
    cache.put(b"L", rows(4), shape(4), cost_ms=1e9)
    assert kept(cache, "abL") == "ab"


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(1, 4), st.booleans()), max_size=80))
def test_the_bound_holds_and_the_books_balance(steps: list[tuple[str, int, bool]]) -> None:
    cache = EmbeddingCache(6 * SIZE)
    for key, size, read in steps:
        if read:
            found = cache.get(key.encode(), shape(size))
            assert found is None or len(found) == size
        else:
            cache.put(key.encode(), rows(size), shape(size), cost_ms=size)
        stats = cache.stats()
        assert stats.used_bytes == sum(entry.num_bytes for entry in cache._entries.values()) <= cache.max_bytes
        assert len(cache._ranks) <= 2 * stats.num_entries + 65
