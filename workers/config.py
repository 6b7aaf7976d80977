"""`WorkerConfig`: one worker's device, threads and bounds; holds the `EncoderConfig`."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ByteSize, Field, ValidationInfo, field_validator

from encoder.config import EncoderConfig


class WorkerConfig(BaseModel, frozen=True, extra="forbid"):
    """One worker: one process with one encoder on one device."""

    encoder: EncoderConfig

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: the GPU when there is one."""

    decode_threads: int | None = Field(default=None, ge=1, le=256)
    """Threads that decode and cut images beside the GPU. None: its share of the CPU cores, 2 to 16."""

    torch_threads: int | None = Field(default=None, ge=1, le=256)
    """Threads of torch on the CPU. None: on a CPU worker its share of the CPU cores, on a GPU worker 1."""

    max_queue_ms: float = Field(default=2_000.0, gt=0)
    """Predicted GPU milliseconds of work that may wait; more is refused at the door. One item always fits."""

    max_queue_bytes: ByteSize = Field(default=ByteSize(2**30), ge=1)
    """Bytes that this work may hold, as it came and as patches; more is refused at the door. One item always fits."""

    batch_patience_s: float = Field(default=5.0, ge=0)
    """Batch items let interactive ones pass that come at most so long after them."""

    max_ready_patches: int = Field(default=131_072, ge=1)
    """Decoded patches that may wait for the GPU (588 bytes each for MiniCPM-V); decoding pauses beyond it."""

    gpu_memory_share: float = Field(default=1.0, gt=0, le=1)
    """Part of the GPU's memory that torch may take in this process; no more than the group's `gpu_share`."""

    replays_in_flight: int = Field(default=2, ge=1, le=3)
    """Replays submitted to the GPU before the oldest is awaited: copies of one overlap the other."""

    graph_memory_gib: float | None = Field(default=None, gt=0)
    """Memory for graphs that are captured while the pool runs. None: nine tenths of what the GPU has free beside the
    weights; 1 GiB on a CPU."""

    encode_calls: int = Field(default=32, ge=1, le=512)
    """Encode calls of each priority that run at once; those that decode overlap those that replay."""

    cache_bytes: ByteSize = Field(default=ByteSize(0), ge=0)
    """Host memory for embeddings of items seen before, such as "4GiB"; 0: none.

    A service wants it: a chat sends its pictures again with every turn, and a hit costs neither decoding nor GPU time.
    Off by default because a folder of files hardly repeats itself, clients and workers read every item once more for
    its digest (0.4 ms for 600 KB), and memory is not ours to take unasked. A slice of MiniCPM-V 2.6 takes 448 KiB in
    bfloat16: 4 GiB hold some 1,300 photos of 7 slices.
    """

    report_interval_s: float = Field(default=1.0, gt=0, le=3600)
    """Longest silence between two reports to the router."""

    @field_validator("device")
    @classmethod
    def _can_compute(cls, device: str, others: ValidationInfo) -> str:
        encoder: EncoderConfig | None = others.data.get("encoder")
        if device != "cpu" or encoder is None:
            return device
        if encoder.precision == "fp8":
            raise ValueError("encoder.precision fp8 needs a GPU (Hopper or later); leave it out")
        if encoder.attention not in ("auto", "sdpa"):
            raise ValueError(f"encoder.attention {encoder.attention} needs a GPU; leave it out")
        return device
