"""`EncoderConfig`: which model, in which numbers, with which graphs and limits."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import BaseModel, ByteSize, Field, ValidationInfo, field_validator, model_validator

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Output = Literal["patches", "pooled"]
Precision = Literal["native", "fp8"]
AttentionBackend = Literal["auto", "triton", "cudnn", "varlen", "sdpa"]


class VideoConfig(BaseModel, frozen=True, extra="forbid"):
    """Which frames of a video are encoded, and how large a video may be."""

    fps: float | None = Field(default=None, gt=0, le=240)
    """Frames taken a second, spread evenly; no more than cameras take. None: what the model's own processor takes."""

    num_frames: int | None = Field(default=None, ge=1)
    """Frames taken in all, spread evenly over the clip, instead of `fps`."""

    min_frames: int | None = Field(default=None, ge=1)
    max_frames: int | None = Field(default=None, ge=1)
    """Bounds on what `fps` gives. None: the model's own."""

    max_group_frames: int | None = Field(default=None, ge=1, le=6)
    """Frames that share one block of tokens when a clip is long (MiniCPM-V 4.5). None: 3."""

    max_bytes: ByteSize = Field(default=ByteSize(2**30), ge=1)
    """Bytes an encoded video may have."""

    max_duration_s: float = Field(default=3600.0, gt=0)
    """Length a video may have: all of it up to the last frame taken has to be decoded."""

    @model_validator(mode="after")
    def _one_rule(self) -> VideoConfig:
        if self.fps is not None and self.num_frames is not None:
            raise ValueError("fps and num_frames are two rules for the same; name one")
        if self.min_frames and self.max_frames and self.min_frames > self.max_frames:
            raise ValueError(f"min_frames {self.min_frames} is above max_frames {self.max_frames}")
        return self


class EncoderConfig(BaseModel, frozen=True, extra="forbid"):
    """One encoder as one worker runs it."""

    model: str
    """A preset (`encpool models` lists them), a local snapshot directory, or a hub id."""

    dtype: Dtype = "auto"
    """auto: bfloat16 on a GPU, float32 on a CPU."""

    output: Output = "patches"
    """Of plain image encoders (SigLIP, CLIP, DINOv3): a token for each patch, or one for the image (`pooled`)."""

    precision: Precision = "native"
    """fp8: most GEMMs in 8-bit floats, calibrated on drawn pictures at start (Hopper, bfloat16, MiniCPM-V 2.5 to 4.0).
    Faster, less exact."""

    seed: int = 0
    """Seed of the weights of a `tiny-*` or `random-*` preset."""

    graphs: bool = True
    """Capture graphs. False runs everything eagerly."""

    layouts: tuple[str, ...] = ("packed",)
    """Keys of the layout axis: "packed" (any mix of grids end to end), "24x43" (segments of exactly 24 rows and
    43 columns of patches), "<=32x64" (any segment that fits into it, masked), or "vllm" for vLLM's four."""

    token_budgets: tuple[int, ...] | dict[str, tuple[int, ...]] | None = None
    """Output rows a graph has room for, one graph a budget; per layout when given as a map. None: inferred."""

    traffic: dict[int, float] | None = None
    """Tokens of an item, and how often such items come (any unit): token budgets are chosen for them where none are
    named. `encpool plan` prints it from a trace. For encoders with one combination of axis keys."""

    max_segments_per_graph: int | None = Field(default=None, ge=1)
    """Most segments in one replay. None: as many as the token budget holds."""

    attention: AttentionBackend = "auto"
    """Backend of the packed layout's attention. auto: the fastest that runs here."""

    max_slice_nums: int | None = Field(default=None, ge=1, le=64)
    """Slices or tiles of an image, at most (MiniCPM-V, InternVL, Llama 4, LFM2-VL). None: what the checkpoint says."""

    max_pixels: int = Field(default=89_478_485, ge=1)
    """Pixels an image may have; checked before it is decoded."""

    max_bytes: ByteSize = Field(default=ByteSize(64 * 2**20), ge=1)
    """Bytes an encoded image may have."""

    resize_pixels: tuple[int, int] | None = None
    """Least and most pixels that an image is resized to (Qwen-VL, Cohere Compass). None: what the checkpoint says."""

    video: VideoConfig = VideoConfig()
    """Sampling and limits of videos, for models that take them."""

    eager_patches: int = Field(default=16_384, ge=1)
    """Patches that one eager run may join where no graph holds its segments; a longer segment still runs, alone."""

    @field_validator("precision")
    @classmethod
    def _goes_with_dtype(cls, precision: Precision, others: ValidationInfo) -> Precision:
        if precision == "fp8" and others.data.get("dtype") in ("float32", "float16"):
            raise ValueError(f"goes with dtype bfloat16, not {others.data['dtype']}")
        return precision

    @field_validator("traffic")
    @classmethod
    def _traffic_counts(cls, value: dict[int, float] | None) -> dict[int, float] | None:
        if value is not None and not (value and all(t >= 1 and 0 < w < math.inf for t, w in value.items())):
            raise ValueError("map positive numbers of tokens to positive weights")
        return value

    @field_validator("token_budgets", mode="before")
    @classmethod
    def _lists_to_tuples(cls, value: object) -> object:
        if isinstance(value, dict):
            return {key: tuple(budgets) if isinstance(budgets, list) else budgets for key, budgets in value.items()}
        return value
