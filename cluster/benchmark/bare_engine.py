"""The engine's own throughput, host to host, as JSON: read a task from stdin, print figures. See pool.py."""

from __future__ import annotations

import json
import math
import statistics
import sys

import torch

from encoder.benchmark.measure import seconds_of, wall_seconds
from encoder.config import EncoderConfig
from encoder.pictures import draw_picture
from encoder.runner import EncoderRunner

RUN_S = 0.8  # at least, on a GPU, so that filling and emptying the pipeline do not count
REPEATS = 7


def main() -> None:
    """Encode the pictures' segments again and again; the median run counts."""
    task = json.load(sys.stdin)
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    runner = EncoderRunner.from_config(EncoderConfig.model_validate(task["encoder"]), str(device))
    runner.capture()
    prepared = [
        runner.adapter.prepare(draw_picture(width, height, seed)) for seed, (width, height) in enumerate(task["sizes"])
    ]
    segments = [segment for item in prepared for segment in item]
    (once_s,) = wall_seconds(lambda: runner.encode(segments), device, 1)
    if device.type == "cuda":
        segments = segments * math.ceil(RUN_S / once_s)
    runner.forget_stats()
    seconds = [seconds_of(lambda: runner.encode(segments), device) for _ in range(REPEATS)]
    stats = runner.stats
    figures = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "segments_per_s": len(segments) / statistics.median(seconds),
        "busy": stats.device_ms / 1e3 / sum(seconds),
        "fill": stats.useful_patches / max(1, stats.replayed_patches),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
