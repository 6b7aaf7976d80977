"""The engine bench of the Qwen-VL line: our packed graphs beside transformers' own tower, one image or clip at a time.

vLLM's padded grids do not apply: nobody pads these towers. The tower's attention is SDPA, segment by segment (and
window by window), as a user gets it without further packages; and, beside it, FlashAttention 2 for ragged rows.
"""

# Shapes: P patches of an image, C numbers of a patch, T tokens, D tower width, E width of an output row.

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import transformers
from PIL import Image
from torch import Tensor

from encoder.adapters.base import Segment
from encoder.adapters.frame_indices import frame_indices
from encoder.adapters.qwen_vl import QwenVL
from encoder.adapters.qwen_vl_weights import PREFIX
from encoder.adapters.registry import load_adapter, resolve_model
from encoder.adapters.smart_resize import MAX_RATIO
from encoder.attention import varlen_attention
from encoder.benchmark.measure import matmul_peak
from encoder.benchmark.rows import Report, Row, baseline_row, report_beside_eager
from encoder.benchmark.workloads import VIDEO_FRAMES, VIDEO_SIZE, Workload, choose, image_workloads, prepared
from encoder.config import EncoderConfig
from encoder.media import MediaHeader
from encoder.pictures import Size, draw_picture
from encoder.precision import resolve_dtype
from encoder.types import SegmentShape
from encoder.video import Video
from encoder.weights import obtain_tensors

RUN_S = 2.0  # of a saturated run on a GPU: a full graph takes a fifth of a second here
NUM_CLIPS, CLIP_FPS, SMALL_VIDEO = 4, 2.0, (320, 180)
RAGGED = "flash_ragged"
"""Transformers takes an attention whose name contains "flash" for one of ragged rows."""

_TOWERS = {
    "2": ("qwen2_vl", "Qwen2VLVisionConfig", "Qwen2VisionTransformerPretrainedModel"),
    "2.5": ("qwen2_5_vl", "Qwen2_5_VLVisionConfig", "Qwen2_5_VisionTransformerPretrainedModel"),
    "3": ("qwen3_vl", "Qwen3VLVisionConfig", "Qwen3VLVisionModel"),
}


def bench_qwen(config: EncoderConfig, device_name: str, *, repeats: int = 5, only: Sequence[str] = ()) -> Report:
    """Measure our engine and the eager loops on one device."""
    device = torch.device(device_name)
    dtype, on_gpu = resolve_dtype(config.dtype, device), device.type == "cuda"
    adapter = load_adapter(config)
    assert isinstance(adapter, QwenVL)
    workloads = choose(make_workloads(adapter, small=not on_gpu), only)
    peak = matmul_peak(device, dtype)
    rows: list[Row] = []
    weights = obtain_tensors(resolve_model(config.model).snapshot, adapter.weight_shapes(), seed=config.seed)
    loop = QwenLoop(config, adapter, weights, device, dtype)
    for attention in ("sdpa", RAGGED) if on_gpu else ("sdpa",):
        loop.attend_by(attention)
        for workload in workloads:
            if on_gpu and attention == "sdpa" and adapter.sizes.window_tokens and workload.saturated:
                continue  # thousands of calls an image, one a window: single images show it
            rows.append(baseline_row(f"eager, {attention}", loop.encode, device, workload, peak, repeats, {}))
    del loop
    return report_beside_eager(config, device_name, "packed", rows, workloads, peak=peak, repeats=repeats, run_s=RUN_S)


def make_workloads(adapter: QwenVL, *, small: bool) -> list[Workload]:
    """Traffic, one image alone, random sizes, and clips; `small`: a taste of them, for a CPU."""
    flops_of = partial(useful_flops, adapter)
    num_clips, num_frames, size = (1, 4, SMALL_VIDEO) if small else (NUM_CLIPS, VIDEO_FRAMES, VIDEO_SIZE)
    clips = Workload(
        name="video",
        images=prepared(lambda seed: adapter.prepare_video(DrawnClip(num_frames, seed, size)), range(num_clips)),
        saturated=True,
        flops_of=flops_of,
    )
    return [*image_workloads(adapter, flops_of, small=small, most_ratio=MAX_RATIO), clips]


class DrawnClip(Video):
    """A clip of drawn frames, all of which are sampled."""

    def __init__(self, num_frames: int, seed: int, size: Size = VIDEO_SIZE) -> None:
        width, height = size
        super().__init__(b"", MediaHeader(width=width, height=height, num_frames=num_frames, frames_per_s=CLIP_FPS))
        self._pictures = [draw_picture(width, height, 10 * seed + number) for number in range(4)]

    def frames(self, numbers: Sequence[int]) -> Iterator[Image.Image]:
        """Four pictures over and over."""
        return (self._pictures[number % len(self._pictures)] for number in numbers)


class QwenLoop:
    """transformers' own tower, eagerly, one image or clip in a forward; pixels are normalised before the clock runs."""

    def __init__(
        self,
        config: EncoderConfig,
        adapter: QwenVL,
        weights: Mapping[str, Tensor],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Attention by SDPA, segment by segment."""
        self.adapter, self.device, self.dtype = adapter, device, dtype
        vision = resolve_model(config.model).config["vision_config"]
        self._tower = _tower(adapter, vision, weights, device, dtype)
        self._prepared: dict[int, tuple[Sequence[Segment], Tensor, Tensor]] = {}  # by an image's identity; kept alive

    def attend_by(self, attention: str) -> None:
        """Take another attention: "sdpa", or RAGGED for FlashAttention 2 over all segments at once."""
        transformers.AttentionInterface.register(RAGGED, _ragged_attention)
        self._tower.config._attn_implementation = attention

    @torch.inference_mode()
    def encode(self, image: Sequence[Segment]) -> Tensor:
        """Rows `[T, E]` on the device."""
        if id(image) not in self._prepared:
            self._prepared[id(image)] = (image, *self._prepare(image))
        _, pixels_PC, grid_thw = self._prepared[id(image)]
        output = self._tower(pixels_PC.to(self.device, non_blocking=True), grid_thw=grid_thw)
        levels = getattr(output, "deepstack_features", None) or []
        return torch.cat([output.pooler_output, *levels], dim=1)

    def _prepare(self, image: Sequence[Segment]) -> tuple[Tensor, Tensor]:
        """What the processor gives for these segments, on the host in the tower's dtype, and its grid."""
        sizes = self.adapter.sizes
        _, rows, columns = image[0].shape.grid
        places = frame_indices(rows, columns, sizes.merge_size, sizes.window_tokens).places_T
        stored = torch.stack([torch.from_numpy(segment.patches_PC) for segment in image])  # segment, patch, number
        stored, by_row = stored.to(self.device), torch.from_numpy(places).long().to(self.device)
        tokens = stored.unflatten(1, (len(places), -1))[:, by_row].flatten(0, 2)
        frames = tokens.view(len(tokens), -1, sizes.patch_size, sizes.patch_size, 3)
        frames = frames.expand(-1, sizes.temporal_patch_size, -1, -1, -1).permute(0, 4, 1, 2, 3)
        mean, std = (
            torch.tensor(values, device=self.device).view(3, 1, 1, 1)
            for values in (sizes.pixels.mean, sizes.pixels.std)
        )
        pixels_PC = ((frames.float() / 255 - mean) / std).flatten(1).to(self.dtype).cpu()
        if self.device.type == "cuda":
            pixels_PC = pixels_PC.pin_memory()
        return pixels_PC, torch.tensor([[len(image), rows, columns]], device=self.device)


def _tower(
    adapter: QwenVL, vision: Mapping[str, Any], weights: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype
) -> Any:
    """transformers' tower with the released weights; attention by SDPA."""
    from transformers.initialization import no_init_weights

    generation = adapter.sizes.generation
    package, config_class, model_class = _TOWERS[generation]
    module = f"transformers.models.{package}"
    settings = {key: value for key, value in vision.items() if key != "model_type"}
    config = getattr(importlib.import_module(f"{module}.configuration_{package}"), config_class)(**settings)
    config._attn_implementation = "sdpa"
    with no_init_weights():
        tower: Any = getattr(importlib.import_module(f"{module}.modeling_{package}"), model_class)(config)
    prefix = f"{PREFIX[generation]}."
    state = {name.removeprefix(prefix): tensor.to(device, dtype) for name, tensor in weights.items()}
    tower.load_state_dict(state, assign=True)
    return tower.to(device).eval()  # its rotary frequencies stay in float32


def _ragged_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None = None, **lengths: Any
) -> tuple[Tensor, None]:
    """FlashAttention 2 over the segments, as transformers calls it: heads `[1, H, P, K]`."""
    q, k, v = (heads[0].transpose(0, 1) for heads in (query, key, value))
    return varlen_attention(q, k, v, lengths["cu_seq_lens_q"], int(lengths["max_length_q"]))[None], None


def useful_flops(adapter: QwenVL, shapes: Sequence[SegmentShape]) -> float:
    """Multiplications and additions that these segments ask of tower and mergers, pads left out."""
    sizes = adapter.sizes
    width, merged = sizes.width, sizes.width * sizes.patches_per_token
    projections = 3 if sizes.generation == "2.5" else 2
    per_layer = 2 * (4 * width**2 + projections * width * sizes.mlp_width)
    per_patch = 2 * sizes.temporal_patch_size * sizes.frame_bytes * width + sizes.num_layers * per_layer
    per_token = (1 + len(sizes.deepstack_layers)) * 2 * (merged**2 + merged * sizes.token_width)
    whole = len(sizes.full_layers) if sizes.window_tokens else sizes.num_layers
    windows = (sizes.num_layers - whole) * (sizes.window_tokens * sizes.merge_size) ** 2
    return sum(
        shape.num_patches * (per_patch + 4 * width * (whole * shape.num_patches + windows))
        + shape.num_tokens * per_token
        for shape in shapes
    )
