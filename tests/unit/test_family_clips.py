"""Clips through every family that takes them on transformers' modules: whole models of transformers as the reference.

`test_clip_sizes.py` compares which frames are read, and their sizes; here they are embedded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from clips import DRAWN_SIZE as SIZE
from clips import DrawnFrames
from family_cases import beside, piece_by_piece, save_reference
from PIL import Image
from released import functions_of

from encoder.adapters.cutting import Tile
from encoder.adapters.processors import processor_of
from encoder.adapters.qwen_vl import QwenVL
from encoder.adapters.registry import load_adapter, resolve_model
from encoder.adapters.stock_families import Pixels
from encoder.config import EncoderConfig, VideoConfig
from encoder.pictures import draw_picture
from encoder.runner import EncoderRunner
from encoder.snapshots import PROCESSOR_FILES

TOLERANCE = 1e-4


@dataclass(frozen=True, kw_only=True)
class ClipCase:
    """A family, and how transformers computes the tokens of a clip's frames."""

    preset: str
    model: str  # class name in transformers
    tokens: Callable[[Any, Any, Sequence[Image.Image]], torch.Tensor]  # from the model, our adapter, frames
    num_frames: int = 9  # that are sampled
    budgets: tuple[int, ...]  # of graphs that hold no whole clip

    def __str__(self) -> str:
        return self.preset.removeprefix("tiny-")


def pixels_of(pixels: Pixels, frames: Sequence[Image.Image], tile: Tile) -> torch.Tensor:
    """Normalised frames `[N, 3, height, width]`, resized and padded as the tile says."""
    mean, std = (torch.tensor(values)[:, None, None] for values in (pixels.mean, pixels.std))
    pictures = []
    for frame in frames:
        for size in tile.resized:
            frame = frame.resize(size, pixels.resample)
        canvas = Image.new("RGB", tile.size or tile.resized[-1])
        canvas.paste(frame)
        pictures.append((torch.from_numpy(np.array(canvas)).permute(2, 0, 1) / 255 - mean) / std)
    return torch.stack(pictures)


def patchify(model: str, pixels: torch.Tensor, *arguments: int) -> tuple[torch.Tensor, list[int]]:
    """A video processor's own cut of frames into patches, and the grid."""
    file = f"{model}/video_processing_{model}.py"
    patches, *grid = functions_of(file, {"patchify"})["patchify"](None, pixels[None], *arguments)
    return patches[0], grid


def squares(model: Any, adapter: Any, frames: Sequence[Image.Image]) -> torch.Tensor:
    """InternVL, SmolVLM: a square a frame."""
    pixels = pixels_of(adapter.family.pixels, frames, adapter.family.frame_tile(*SIZE))
    if model.config.model_type == "internvl":
        return model.get_image_features(pixels).pooler_output.flatten(0, 1)
    return torch.cat(list(model.get_image_features(pixels[None]).pooler_output))


def pairs(model: Any, adapter: Any, frames: Sequence[Image.Image]) -> torch.Tensor:
    """GLM-4V: an even number of frames."""
    frames = [*frames, *frames[-1:] * (len(frames) % 2)]
    (tile,) = adapter.family.cut_frame(*SIZE, len(frames))
    patches, grid = patchify("glm4v", pixels_of(adapter.family.pixels, frames, tile), 14, 2, 2)
    return torch.cat(model.get_video_features(patches, torch.tensor([grid])).pooler_output)


def deep_pairs(model: Any, adapter: Any, frames: Sequence[Image.Image]) -> torch.Tensor:
    """Cohere Compass, which repeats the last of an odd number of frames."""
    _, rows, columns = adapter.probe_video(DrawnFrames(len(frames)).header).grids[0]
    pixels = adapter.sizes.pixels
    tile = Tile(resized=((16 * columns, 16 * rows),))
    patches, grid = patchify("cohere_compass", pixels_of(pixels, frames, tile), 16, 2, 2)
    return beside(model.model.visual(patches, torch.tensor([grid])))


def chunks(model: Any, adapter: Any, frames: Sequence[Image.Image]) -> torch.Tensor:
    """Kimi-K2.5: four frames together, and what is left over; each alone: transformers 5.17 takes no mix of them."""
    (tile,) = adapter.family.cut_frame(*SIZE, len(frames))
    parts = [patchify("kimi_k25", chunk, 14) for chunk in pixels_of(adapter.family.pixels, frames, tile).split(4)]
    features = [model.model.vision_tower(patches, grid_thw=torch.tensor([grid])) for patches, grid in parts]
    return torch.cat([model.model.mm_projector(output.pooler_output).squeeze(1) for output in features])


def slices(model: Any, adapter: Any, frames: Sequence[Image.Image]) -> torch.Tensor:
    """MiniCPM-V 4.6: frames are sliced as images are."""
    processor = transformers.MiniCPMV4_6ImageProcessorPil(**processor_of(resolve_model("tiny-minicpmv-4.6").config))
    batches = [processor(frame, return_tensors="pt") for frame in frames]
    return torch.cat([tokens for batch in batches for tokens in piece_by_piece(model, **batch)])


CLIPS = [
    ClipCase(preset="tiny-internvl", model="InternVLForConditionalGeneration", tokens=squares, budgets=(4, 16)),
    ClipCase(preset="tiny-smolvlm", model="SmolVLMForConditionalGeneration", tokens=squares, budgets=(1, 4)),
    ClipCase(preset="tiny-glm4v", model="Glm4vForConditionalGeneration", tokens=pairs, budgets=(16, 64)),
    ClipCase(preset="tiny-minicpmv-4.6", model="MiniCPMV4_6ForConditionalGeneration", tokens=slices, budgets=(8, 32)),
    ClipCase(preset="tiny-kimi-k2.5", model="Kimi_K25ForConditionalGeneration", tokens=chunks, budgets=(16, 32)),
    ClipCase(
        preset="tiny-cohere-compass", model="CohereCompassForConditionalGeneration", tokens=deep_pairs, budgets=(8, 16)
    ),
]


@dataclass(frozen=True, kw_only=True)
class Reference:
    """transformers' model, and the configuration with which ours reads what it saved."""

    case: ClipCase
    model: Any
    config: EncoderConfig


@pytest.fixture(scope="module", params=CLIPS, ids=str)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    case: ClipCase = request.param
    snapshot = tmp_path_factory.mktemp("clips") / str(case)
    model, files = save_reference(case.preset, case.model, snapshot)
    for key, settings in files.items():
        (snapshot / PROCESSOR_FILES[key]).write_text(json.dumps(settings))
    config = {"model": str(snapshot), "video": {"num_frames": case.num_frames}, "token_budgets": case.budgets}
    return Reference(case=case, model=model, config=EncoderConfig.model_validate(config))


@torch.inference_mode()
def test_clips_equal_transformers(reference: Reference) -> None:
    """Through several replays beside a still, and eagerly, alone."""
    runner = EncoderRunner.from_config(reference.config, "cpu")
    runner.capture()
    adapter: Any = runner.adapter
    clip = DrawnFrames(reference.case.num_frames)
    segments = list(adapter.prepare_video(clip))
    assert adapter.probe_video(clip.header).grids == tuple(segment.shape.grid for segment in segments)
    still = adapter.prepare(draw_picture(60, 60, 99))
    outputs, launches = runner.encode_traced([*segments, *still])
    assert len(launches) > 1
    assert runner.stats.hit_rate == 1
    theirs = reference.case.tokens(reference.model, adapter, list(clip.frames(range(reference.case.num_frames))))
    eager = EncoderRunner.from_config(reference.config.model_copy(update={"graphs": False}), "cpu")
    for ours in (outputs[: len(segments)], [eager.encode([segment])[0] for segment in segments]):
        assert [len(tokens) for tokens in ours] == [segment.shape.num_tokens for segment in segments]
        assert torch.cat(ours).shape == theirs.shape
        assert (torch.cat(ours) - theirs).norm() / theirs.norm() < TOLERANCE
    (alone,) = eager.encode(still[:1])
    assert (outputs[len(segments)] - alone).norm() / alone.norm() < TOLERANCE


def test_frames_and_their_order_matter(reference: Reference) -> None:
    """Guards the comparison above: other frames, or the same in another order, give other tokens."""
    adapter, frames = load_adapter(reference.config), [draw_picture(*SIZE, seed) for seed in range(4)]
    with torch.inference_mode():
        one, other = (reference.case.tokens(reference.model, adapter, order) for order in (frames, frames[::-1]))
    assert (one - other).norm() / one.norm() > 1e-2


def test_a_clip_is_decoded_no_further_than_its_next_segment(reference: Reference) -> None:
    """However long it is: of a day only so many frames as the segments taken so far are made of."""
    config = reference.config.model_copy(update={"video": VideoConfig(num_frames=5000)})
    adapter: Any = load_adapter(config)
    clip = DrawnFrames(86_400, frames_per_s=1.0)
    together = 2 if isinstance(adapter, QwenVL) else getattr(adapter.family, "frames_together", 1)
    segments = adapter.prepare_video(clip)
    for _ in range(20):
        assert next(segments).patches_PC.nbytes < 10**6
    assert clip.given <= 20 * together
