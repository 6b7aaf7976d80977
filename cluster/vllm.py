"""`to_vllm`: an embedding as the content part of a chat message that vLLM's `--enable-mm-embeds` path takes.

After vLLM's documentation "Multimodal inputs", section "Embedding inputs", and its chat parser, one part an item:
each tensor of a part is `torch.save`d and base64-coded; rows of one item are 2-D. MiniCPM-V also wants the picture's
size (it works out the slices again to place their tokens), the Qwen-VL line the grid in patches (for its positions).
An output row of Qwen3-VL already carries its deepstack features beside the merged ones, as vLLM wants them.
"""

# Shapes: T rows of an item, E width of a token.

from __future__ import annotations

import base64
import io
from functools import lru_cache
from typing import Any

import torch

from cluster.streams.outcomes import Embedding
from cluster.streams.sources import Source, read_source
from encoder.adapters.registry import resolve_model
from encoder.errors import EncodeError
from encoder.media import probe_header
from workers.cache_keys import content_digest

QWEN_VL = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"})


def to_vllm(embedding: Embedding, source: Source, *, model: str, max_bytes: int = 2**30) -> dict[str, Any]:
    """A content part of type `image_embeds`.

    Its `uuid` is the digest of the picture's bytes in hexadecimal: vLLM's caches then know the picture again, and
    `cluster.vllm_ec_connector` finds it in the pool.

    Args:
        embedding: what the pool made of `source`.
        source: the picture, as a path or its bytes; only its header is read.
        model: the pool's `worker.encoder.model`, which vLLM has to serve too.

    Raises:
        EncodeError: a clip, or an embedding that is not of this model.
        BadMediaError: a source that cannot be read.
    """
    data = read_source(source, max_bytes)
    tokens_TE = embedding.tokens
    if tokens_TE.ndim != 2 or len(tokens_TE) != embedding.shape.num_tokens:
        raise EncodeError(f"an embedding has shape [tokens, width], got {list(tokens_TE.shape)}")
    model_type = _model_type(model)
    rows = tensor_to_base64(tokens_TE)
    body: str | dict[str, str] = rows
    if model_type == "minicpmv":
        header = probe_header(data, max_pixels=2**62, max_bytes=max_bytes)
        body = {
            "image_embeds": rows,
            "image_sizes": tensor_to_base64(torch.tensor([header.width, header.height])),
        }
    elif model_type in QWEN_VL:
        if len(embedding.shape.grids) != 1 or embedding.shape.grids[0][0] != 1:
            raise EncodeError(
                f"an image of {model_type} is one grid of one frame, got {len(embedding.shape.grids)} of "
                f"{embedding.shape.grids[0][0]}; hand clips to vLLM as they are"
            )
        body = {
            "image_embeds": rows,
            "image_grid_thw": tensor_to_base64(torch.tensor(embedding.shape.grids[0])),
        }
    return {"type": "image_embeds", "image_embeds": body, "uuid": content_digest(data).hex()}


def tensor_to_base64(tensor: torch.Tensor) -> str:
    """As vLLM reads it: `torch.load(..., weights_only=True)` of the decoded bytes."""
    buffer = io.BytesIO()
    torch.save(tensor.contiguous(), buffer)
    return base64.b64encode(buffer.getvalue()).decode("ascii")


@lru_cache(maxsize=64)
def _model_type(model: str) -> str:
    found = resolve_model(model)
    return str(found.config.get("model_type", found.family.model_types[0]))
