"""The answer to a call: tokens of all its jobs in one array, what became of each, and spans of their stages."""

# Shapes: T output rows of a call, E width of a token.

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from encoder.runner import EncoderRunner
from workers import spans
from workers.job import Job
from workers.messages import EncodeResult, ErrorNote, ItemResult


def answer(
    worker_id: str, jobs: Sequence[Job], runner: EncoderRunner, room: np.ndarray | None = None, *, shared: bool
) -> EncodeResult:
    """What a call's jobs, all settled, came to, in their order; the tokens in `room` if they fit into these bytes.

    `shared`: jobs may share their rows with others, such as the cache; an answer is its owner's to change.
    """
    blocks = [block for job in jobs for block in job.outputs if block is not None]
    out_TE = (
        gather(blocks, room, shared=shared)
        if blocks
        else torch.empty(0, runner.adapter.hidden_size, dtype=runner.dtype)
    )
    words = out_TE.view(torch.uint16) if runner.dtype == torch.bfloat16 else out_TE
    return EncodeResult(
        worker_id=worker_id,
        dtype=str(runner.dtype).removeprefix("torch."),
        tokens_TE=words.numpy(),
        items=tuple(
            ItemResult(
                num_tokens=sum(len(block) for block in job.outputs if block is not None),
                graphs=tuple(job.graphs),
                misses=tuple(job.misses),
                timings_ms=job.timings_ms.copy(),  # of one that failed, runs under way still write there
                cached=job.cached and job.error is None,
                error=None if job.error is None else ErrorNote.of(job.error),
            )
            for job in jobs
        ),
    )


def gather(blocks: Sequence[torch.Tensor], room: np.ndarray | None = None, *, shared: bool = False) -> torch.Tensor:
    """All rows end to end: in `room` if they fit into these bytes, else in memory of their own, or of a lone block."""
    first = blocks[0]
    num_rows, width = sum(len(block) for block in blocks), first.shape[1]
    num_bytes = num_rows * width * first.itemsize
    if room is not None and num_bytes <= len(room):
        out_TE = torch.from_numpy(room[:num_bytes]).view(first.dtype).view(num_rows, width)
        return torch.cat(list(blocks), out=out_TE)
    return first if len(blocks) == 1 and not shared else torch.cat(list(blocks))


def record_stages(job: Job, trace: str) -> None:
    """Spans of an item's stages, of one that ran here and now."""
    if not trace or job.started_s is None:
        return
    decode_ms, wait_ms = job.timings_ms.get("decode", 0.0), job.timings_ms.get("wait", 0.0)
    spans.past("decode", trace, job.started_s - (wait_ms + decode_ms) / 1e3, decode_ms)
    spans.past("wait", trace, job.started_s - wait_ms / 1e3, wait_ms)
    spans.past("replay", trace, job.started_s, job.timings_ms.get("replay", 0.0), graphs=" + ".join(job.graphs))


def row_bytes(runner: EncoderRunner) -> int:
    """Bytes of one token in an answer."""
    return runner.adapter.hidden_size * runner.dtype.itemsize
