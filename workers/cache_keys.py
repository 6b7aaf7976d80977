"""Under which key an embedding is kept: a digest of everything that decides its numbers, and of nothing else. No torch.

Layouts, budgets and backends change an embedding no more than the batch it happens to run in does, so they stay out.
Of the encoder's settings all others count: one that nobody has thought of here yet makes other keys, not wrong hits.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from encoder.config import EncoderConfig

if TYPE_CHECKING:
    from encoder.runner import EncoderRunner

DIGEST_BYTES = 16
SHORT_BYTES = 8  # enough for a hint: of a million digests two share one with a chance of 3e-8

NEUTRAL = frozenset(
    {
        "graphs", "layouts", "token_budgets", "traffic", "max_segments_per_graph", "eager_patches", "attention",
        "max_pixels", "max_bytes",  # they refuse an item or leave it as it is
    }
)  # fmt: skip
"""Settings of `EncoderConfig` that leave an embedding the same but for rounding."""

RESOLVED = frozenset({"model", "dtype"})
"""Settings that stand for something which several spellings name: what they came to is in the key instead."""


def content_digest(encoded: bytes | memoryview) -> bytes:
    """Identity of an item's encoded bytes: 128 bits of SHA-256, which is in hardware where BLAKE2 is not."""
    return hashlib.sha256(encoded).digest()[:DIGEST_BYTES]


def short_digest(digest: bytes) -> int:
    """The part of a content digest that the router remembers."""
    return int.from_bytes(digest[:SHORT_BYTES], "big")


def framed_digest(*fields: bytes) -> bytes:
    """One digest of several fields, each with its length before it, so that no two lists of fields run together."""
    state = hashlib.sha256()
    for field in fields:
        state.update(len(field).to_bytes(8, "big"))
        state.update(field)
    return state.digest()[:DIGEST_BYTES]


def encoder_fingerprint(
    settings: EncoderConfig, *, encoder_id: str, checkpoint_config: Mapping[str, Any], weights_digest: bytes
) -> bytes:
    """Identity of the function from pictures to embeddings.

    Args:
        encoder_id: model, dtype and precision it really computes in, such as "minicpmv-2.6@bfloat16".
        checkpoint_config: the model's `config.json`.
        weights_digest: see `encoder.weights.weights_digest`.
    """
    fields = settings.model_dump(mode="json", exclude=set(NEUTRAL | RESOLVED))
    return framed_digest(_canonical(fields), encoder_id.encode(), _canonical(checkpoint_config), weights_digest)


def runner_fingerprint(runner: EncoderRunner) -> bytes:
    """The same of a loaded encoder."""
    return encoder_fingerprint(
        runner.config,
        encoder_id=runner.encoder_id,
        checkpoint_config=runner.adapter.checkpoint_config(),
        weights_digest=runner.weights_digest,
    )


def embedding_key(
    content: bytes,
    *,
    fingerprint: bytes,
    scope: str = "",
    modality: str = "image",
    options: Mapping[str, object] | None = None,
) -> bytes:
    """The cache's key of one item.

    Args:
        content: digest of its encoded bytes.
        fingerprint: of the encoder.
        scope: whose it is; items of one scope never hit what another put there.
        modality: what the bytes are decoded as.
        options: of this item alone, how it is decoded and cut.
    """
    return framed_digest(content, modality.encode(), _canonical(options or {}), fingerprint, scope.encode())


def _canonical(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields, sort_keys=True, separators=(",", ":"), default=str).encode()
