"""transformers' own Qwen-VL towers and image processor, fed with the weights of a preset."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel
from transformers.models.qwen3_vl_moe.configuration_qwen3_vl_moe import Qwen3VLMoeVisionConfig
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeVisionModel

from encoder.adapters.qwen_vl import QwenVL
from encoder.adapters.qwen_vl_config import QwenSizes
from encoder.adapters.qwen_vl_weights import PREFIX
from encoder.adapters.registry import resolve_model
from encoder.weights import random_tensors

CLASSES: dict[str, tuple[Any, Any]] = {
    "qwen2_vl": (Qwen2VLVisionConfig, Qwen2VisionTransformerPretrainedModel),
    "qwen2_5_vl": (Qwen2_5_VLVisionConfig, Qwen2_5_VisionTransformerPretrainedModel),
    "qwen3_vl": (Qwen3VLVisionConfig, Qwen3VLVisionModel),
    "qwen3_vl_moe": (Qwen3VLMoeVisionConfig, Qwen3VLMoeVisionModel),
}


class ReferenceQwenVL:
    """A preset's tower as transformers has it, in float32 on the CPU."""

    def __init__(self, preset: str, adapter: QwenVL) -> None:
        config = resolve_model(preset).config
        config_class, model_class = CLASSES[config["model_type"]]
        vision = {key: value for key, value in config["vision_config"].items() if key != "model_type"}
        self.tower = model_class(config_class(**vision, attn_implementation="sdpa")).eval()
        prefix = f"{PREFIX[adapter.sizes.generation]}."
        weights = random_tensors(adapter.weight_shapes(), 0)
        self.tower.load_state_dict({name.removeprefix(prefix): tensor for name, tensor in weights.items()})
        self.processor = image_processor(adapter.sizes)

    def encode_image(self, picture: Image.Image) -> torch.Tensor:
        """Rows of an image, deepstack levels side by side."""
        features = self.processor(images=[picture], return_tensors="pt")
        return self._encode(features["pixel_values"], features["image_grid_thw"])

    def encode_frames(self, frames: Sequence[Image.Image], sizes: QwenSizes) -> torch.Tensor:
        """Rows of a clip of resized frames, an even number of them."""
        side, merge = sizes.patch_size, sizes.merge_size
        pixels = np.stack([np.asarray(frame) for frame in frames]).astype(np.float32) / 255
        normed = (pixels - np.float32(sizes.pixels.mean)) / np.float32(sizes.pixels.std)
        times, rows, columns = len(frames) // 2, normed.shape[1] // side, normed.shape[2] // side
        blocks = normed.reshape(times, 2, rows // merge, merge, side, columns // merge, merge, side, 3)
        patches = blocks.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(times * rows * columns, -1)
        return self._encode(torch.from_numpy(patches.copy()), torch.tensor([[times, rows, columns]]))

    @torch.inference_mode()
    def _encode(self, pixel_values: torch.Tensor, grid_thw: torch.Tensor) -> torch.Tensor:
        output = self.tower(pixel_values, grid_thw=grid_thw)
        return torch.cat([output.pooler_output, *(getattr(output, "deepstack_features", None) or [])], dim=1)


def image_processor(sizes: QwenSizes) -> Any:
    """transformers' processor with an adapter's settings."""
    return Qwen2VLImageProcessorPil(
        patch_size=sizes.patch_size,
        merge_size=sizes.merge_size,
        temporal_patch_size=sizes.temporal_patch_size,
        size={"shortest_edge": sizes.image_pixels.least, "longest_edge": sizes.image_pixels.most},
        image_mean=list(sizes.pixels.mean),
        image_std=list(sizes.pixels.std),
    )
