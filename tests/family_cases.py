"""Families on transformers' modules, and how transformers itself computes the tokens of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image

from encoder.adapters.registry import resolve_model
from encoder.weights import random_tensors


@dataclass(frozen=True, kw_only=True)
class Case:
    """A family: its tiny preset, and how transformers computes the same tokens."""

    preset: str
    model: str  # class name in transformers
    tokens: Callable[[Any, Any], torch.Tensor]  # from the model and its processor's batch of one image
    processor: str = ""  # class name; empty: transformers has none that runs without torchvision
    settings: dict[str, Any] = field(default_factory=dict)  # of the processor
    output: str = "patches"
    ours: Callable[[Any, Image.Image], dict[str, torch.Tensor]] | None = None  # our preparation as such a batch instead
    num_tokens: Callable[[Any], int] | None = None  # from the processor's batch of one image; None: always the same
    sizes: tuple[tuple[int, int], ...] = ((200, 120), (90, 200), (31, 47), (64, 64))  # of pictures that show it all

    def __str__(self) -> str:
        return f"{self.preset.removeprefix('tiny-')}-{self.output}"


def save_reference(preset: str, model_class: str, directory: Path) -> tuple[Any, dict[str, Any]]:
    """transformers' whole model of a preset's config, with seeded weights, saved as it saves models; and the settings
    of processors that the preset has, under the keys of their files."""
    config = dict(resolve_model(preset).config)
    settings = {key: config.pop(key) for key in ("preprocessor_config", "video_preprocessor_config") if key in config}
    model = getattr(transformers, model_class)(transformers.AutoConfig.for_model(**config)).eval()
    drawn = random_tensors({name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}, seed=3)
    model.load_state_dict(drawn)
    model.save_pretrained(directory)
    return model, settings


def tiles(adapter: Any, image: Image.Image) -> dict[str, torch.Tensor]:
    """Our tiles of an image as pictures of normalised pixels."""
    family = adapter.family
    width, height = family.tile_size
    pictures = [normalised(segment.patches_PC, family).view(height, width, 3) for segment in adapter.prepare(image)]
    return {"pixel_values": torch.stack(pictures).permute(0, 3, 1, 2)}


def naflex(adapter: Any, image: Image.Image) -> dict[str, torch.Tensor]:
    """Our pieces of an image as SigLIP 2's tower takes them: rows of patches in raster order, padded, and grids."""
    segments, merge = adapter.prepare(image), adapter.family.merge
    shapes = torch.tensor([segment.shape.grid[1:] for segment in segments])
    longest = int(shapes.prod(1).max())
    pixels = torch.zeros(len(segments), longest, 3 * adapter.family.patch_size**2)
    mask = torch.zeros(len(segments), longest, dtype=torch.long)
    for index, segment in enumerate(segments):
        _, rows, columns = segment.shape.grid
        squares = normalised(segment.patches_PC, adapter.family).view(rows // merge, columns // merge, merge, merge, -1)
        pixels[index, : rows * columns] = squares.transpose(1, 2).reshape(rows * columns, -1)
        mask[index, : rows * columns] = 1
    return {"pixel_values": pixels, "pixel_attention_mask": mask, "spatial_shapes": shapes}


def patches(adapter: Any, image: Image.Image) -> dict[str, torch.Tensor]:
    """Our patches of an image as Kimi's tower takes them: small pictures in raster order, and the grid."""
    (segment,), family = adapter.prepare(image), adapter.family
    _, rows, columns = segment.shape.grid
    squares = normalised(segment.patches_PC, family).view(rows // 2, columns // 2, 2, 2, -1).transpose(1, 2)
    pixels = squares.reshape(rows * columns, family.patch_size, family.patch_size, 3).permute(0, 3, 1, 2)
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor([segment.shape.grid])}


def beside(output: Any) -> torch.Tensor:
    """A tower's tokens and those of its deepstack levels, side by side."""
    return torch.cat([output.pooler_output, *output.deepstack_features], dim=1)


def piece_by_piece(
    model: Any, pixel_values: torch.Tensor, target_sizes: torch.Tensor, **_: Any
) -> Iterator[torch.Tensor]:
    """MiniCPM-V 4.6's tokens, each slice alone: transformers 5.17 takes slices of one size only."""
    side = pixel_values.shape[2]
    for pixels, size in zip(
        pixel_values.split((target_sizes.prod(1) * side).tolist(), dim=3), target_sizes, strict=True
    ):
        yield from model.get_image_features(pixels, size[None]).pooler_output


def normalised(patches_PC: np.ndarray, family: Any) -> torch.Tensor:
    mean, std = torch.tensor(family.pixels.mean), torch.tensor(family.pixels.std)
    pixels: torch.Tensor = (torch.from_numpy(patches_PC.copy()).unflatten(1, (-1, 3)) / 255 - mean) / std
    return pixels.flatten(1)


CASES = [
    Case(
        preset="tiny-siglip",
        model="SiglipModel",
        processor="SiglipImageProcessorPil",
        settings={"size": {"height": 70, "width": 70}},
        tokens=lambda model, batch: model.vision_model(**batch).last_hidden_state[0],
    ),
    Case(
        preset="tiny-siglip",
        output="pooled",
        model="SiglipModel",
        processor="SiglipImageProcessorPil",
        settings={"size": {"height": 70, "width": 70}},
        tokens=lambda model, batch: model.get_image_features(**batch).pooler_output,
    ),
    Case(
        preset="tiny-clip",
        model="CLIPModel",
        processor="CLIPImageProcessorPil",
        settings={"size": {"shortest_edge": 60}, "crop_size": {"height": 56, "width": 56}},
        tokens=lambda model, batch: model.vision_model(**batch).last_hidden_state[0, 1:],
    ),
    Case(
        preset="tiny-clip",
        output="pooled",
        model="CLIPModel",
        processor="CLIPImageProcessorPil",
        settings={"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}},
        tokens=lambda model, batch: model.get_image_features(**batch).pooler_output,
    ),
    Case(
        preset="tiny-dinov3",
        model="DINOv3ViTModel",
        ours=tiles,
        tokens=lambda model, batch: model(**batch).last_hidden_state[0, 5:],
    ),
    Case(
        preset="tiny-dinov3",
        output="pooled",
        model="DINOv3ViTModel",
        ours=tiles,
        tokens=lambda model, batch: model(**batch).pooler_output,
    ),
    Case(
        preset="tiny-internvl",
        model="InternVLForConditionalGeneration",
        processor="GotOcr2ImageProcessorPil",
        settings={"size": {"height": 56, "width": 56}, "crop_to_patches": True, "max_patches": 6},
        tokens=lambda model, batch: model.get_image_features(batch["pixel_values"]).pooler_output.flatten(0, 1),
        num_tokens=lambda batch: 4 * len(batch["pixel_values"]),
    ),
    Case(
        preset="tiny-gemma3",
        model="Gemma3ForConditionalGeneration",
        processor="Gemma3ImageProcessorPil",
        settings={
            "size": {"height": 56, "width": 56},
            "do_pan_and_scan": True,
            "pan_and_scan_min_crop_size": 64,
            "pan_and_scan_max_num_crops": 4,
            "pan_and_scan_min_ratio_to_activate": 1.2,
        },
        tokens=lambda model, batch: model.get_image_features(batch["pixel_values"]).pooler_output.flatten(0, 1),
        num_tokens=lambda batch: 4 * len(batch["pixel_values"]),
    ),
    Case(
        preset="tiny-llama4",
        model="Llama4ForConditionalGeneration",
        ours=tiles,
        tokens=lambda model, batch: model.multi_modal_projector(model.vision_model(**batch).last_hidden_state).flatten(
            0, 1
        ),
        num_tokens=lambda batch: 4 * len(batch["pixel_values"]),
    ),
    Case(
        preset="tiny-idefics3",
        model="Idefics3ForConditionalGeneration",
        processor="Idefics3ImageProcessorPil",
        tokens=lambda model, batch: torch.cat(model.get_image_features(**batch).pooler_output),
        num_tokens=lambda batch: 4 * batch["pixel_values"].shape[1],
    ),
    Case(
        preset="tiny-smolvlm",
        model="SmolVLMForConditionalGeneration",
        processor="SmolVLMImageProcessorPil",
        tokens=lambda model, batch: torch.cat(model.get_image_features(**batch).pooler_output),
        num_tokens=lambda batch: batch["pixel_values"].shape[1],
    ),
    Case(
        preset="tiny-pixtral",
        model="LlavaForConditionalGeneration",
        processor="PixtralImageProcessorPil",
        settings={"patch_size": {"height": 16, "width": 16}},
        tokens=lambda model, batch: torch.cat(model.get_image_features(**batch).pooler_output),
        num_tokens=lambda batch: batch["image_sizes"][0].prod() // 16**2,
    ),
    Case(
        preset="tiny-mistral-small-3",
        model="Mistral3ForConditionalGeneration",
        processor="PixtralImageProcessorPil",
        settings={"patch_size": {"height": 28, "width": 28}},
        tokens=lambda model, batch: torch.cat(model.get_image_features(**batch).pooler_output),
        num_tokens=lambda batch: batch["image_sizes"][0].prod() // 28**2,
    ),
    Case(
        preset="tiny-siglip2",
        model="Siglip2Model",
        processor="Siglip2ImageProcessorPil",
        tokens=lambda model, batch: model.vision_model(**batch).last_hidden_state[0][
            batch["pixel_attention_mask"][0] > 0
        ],
        num_tokens=lambda batch: batch["pixel_attention_mask"].sum(),
    ),
    Case(
        preset="tiny-siglip2",
        output="pooled",
        model="Siglip2Model",
        processor="Siglip2ImageProcessorPil",
        tokens=lambda model, batch: model.get_image_features(**batch).pooler_output,
    ),
    Case(
        preset="tiny-lfm2-vl",
        model="Lfm2VlForConditionalGeneration",
        ours=naflex,
        tokens=lambda model, batch: torch.cat(model.get_image_features(**batch).pooler_output),
        num_tokens=lambda batch: batch["pixel_attention_mask"].sum() // 4,
    ),
    Case(
        preset="tiny-glm4v",
        model="Glm4vForConditionalGeneration",
        processor="Glm4vImageProcessorPil",
        tokens=lambda model, batch: torch.cat(model.get_image_features(**batch).pooler_output),
        num_tokens=lambda batch: batch["image_grid_thw"].prod() // 4,
    ),
    Case(
        preset="tiny-minicpmv-4.6",
        model="MiniCPMV4_6ForConditionalGeneration",
        processor="MiniCPMV4_6ImageProcessorPil",
        tokens=lambda model, batch: torch.cat(list(piece_by_piece(model, **batch))),
        num_tokens=lambda batch: batch["target_sizes"].prod(1).sum() // 16,
    ),
    Case(
        preset="tiny-kimi-k2.5",
        model="Kimi_K25ForConditionalGeneration",
        ours=patches,
        tokens=lambda model, batch: torch.cat(model.model.get_image_features(**batch).pooler_output),
        num_tokens=lambda batch: batch["image_grid_thw"].prod() // 4,
    ),
    Case(
        preset="tiny-cohere-compass",
        model="CohereCompassForConditionalGeneration",
        processor="CohereCompassImageProcessorPil",
        settings={"patch_size": 16},
        tokens=lambda model, batch: beside(model.model.visual(batch["pixel_values"], batch["image_grid_thw"])),
        num_tokens=lambda batch: batch["image_grid_thw"].prod() // 4,
    ),
    Case(
        preset="tiny-deepseek-ocr-2",
        model="DeepseekOcr2ForConditionalGeneration",
        processor="DeepseekOcr2ImageProcessorPil",
        tokens=lambda model, batch: torch.cat(model.get_image_features(**batch).pooler_output),
        sizes=((200, 120), (500, 900)),
    ),
]
