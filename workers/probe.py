"""The functional probe: a worker that starts puts one picture through every step that an item takes."""

# Shapes: T output rows of a segment, E width of a token.

from __future__ import annotations

import io
import math
import time

import numpy as np
import torch
from PIL import Image

from encoder.errors import WorkerStartError
from encoder.media import decode_image, probe_header
from encoder.packing import EagerCost, Replay
from encoder.runner import EncoderRunner

PROBE_SIZE = (448, 448)
ALONE = Replay(key=None, taken=())  # an eager run that no plan asked for


def probe(runner: EncoderRunner) -> EagerCost:
    """Encode a picture by graph and eagerly, on the thread that owns the runner; a guess at eager costs.

    Raises WorkerStartError when what comes back is not what was promised, or not finite.
    """
    encoded, adapter = probe_picture(), runner.adapter
    max_pixels, max_bytes = math.prod(PROBE_SIZE), len(encoded)  # its own: the configured limits may be smaller
    promised = adapter.probe(probe_header(encoded, max_pixels=max_pixels, max_bytes=max_bytes))
    segments = adapter.prepare(decode_image(encoded, max_pixels=max_pixels, max_bytes=max_bytes))
    if tuple(segment.shape.grid for segment in segments) != promised.grids:
        raise WorkerStartError(f"the probe picture was cut into other grids than {promised.grids}")
    first = segments[:1]
    took_ms = 0.0
    # By graph, then eagerly twice: the second time tells what eager work costs.
    for replay in (runner.plan([first[0].shape]), ALONE, ALONE):
        started_s = time.monotonic()
        tokens_TE = runner.finish(runner.submit(first, replay))[0]
        took_ms = (time.monotonic() - started_s) * 1e3
        if len(tokens_TE) != first[0].shape.num_tokens or not bool(torch.isfinite(tokens_TE).all()):
            raise WorkerStartError(
                f"the probe picture came back as {tuple(tokens_TE.shape)} with "
                f"{int((~torch.isfinite(tokens_TE)).sum())} numbers that are not finite "
                f"({'eagerly' if replay.key is None else replay.key})"
            )
    return EagerCost(base_ms=0.0, ms_per_patch=took_ms / first[0].shape.num_patches, measured=False)


def probe_picture() -> bytes:
    """A small PNG with something to see in it, always the same."""
    width, height = PROBE_SIZE
    rows, columns = np.mgrid[0:height, 0:width]
    pixels = np.stack([rows % 256, columns % 256, (rows * columns) % 256], axis=-1).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG", compress_level=1)
    return buffer.getvalue()
