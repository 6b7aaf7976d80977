"""MiniCPM-V tokens against transformers' tower and torch's attention, from checkpoints in the released layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image
from reference import ReferenceMiniCPMV

from encoder.adapters.minicpmv_slicing import plan_slices
from encoder.checkpoints import init_checkpoint
from encoder.config import EncoderConfig
from encoder.pictures import draw_picture
from encoder.runner import EncoderRunner

VERSIONS = ("2.5", "2.6", "4.0")
LAYOUTS = {
    "packed": ("packed",),
    "exact": ("24x43", "34x30", "32x32", "45x23", "5x200", "9x116"),
    "covering": ("<=32x32", "<=32x64", "<=64x32", "<=10x210"),
    "eager": ("1x1",),
}
SIZES = [(640, 360), (449, 448), (300, 300), (4000, 100)]


@pytest.fixture(scope="module", params=VERSIONS)
def snapshot(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint with the released key names."""
    directory = tmp_path_factory.mktemp("snapshot") / f"tiny-{request.param}"
    init_checkpoint(f"tiny-minicpmv-{request.param}", directory, seed=7)
    return directory


@pytest.fixture(scope="module")
def pictures() -> list[Image.Image]:
    return [draw_picture(width, height, seed) for seed, (width, height) in enumerate(SIZES)]


@pytest.fixture(scope="module")
def expected(snapshot: Path, pictures: list[Image.Image]) -> list[torch.Tensor]:
    """Tokens of every slice of every picture, each slice alone."""
    reference = ReferenceMiniCPMV(snapshot)
    return [reference.encode_slice(cut) for picture in pictures for cut in released_slices(picture)]


def released_slices(picture: Image.Image) -> list[Image.Image]:
    """The overview and the cuts, with Pillow alone."""
    plan = plan_slices(*picture.size)
    slices = [picture.resize(plan.overview, Image.Resampling.BICUBIC)]
    if plan.columns:
        refined = picture.resize(plan.refined, Image.Resampling.BICUBIC)
        width, height = plan.slice_size
        slices += [
            refined.crop((left, top, left + width, top + height))
            for top in range(0, plan.refined[1], height)
            for left in range(0, plan.refined[0], width)
        ]
    return slices


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_equal_the_reference(
    snapshot: Path, pictures: list[Image.Image], expected: list[torch.Tensor], layout: str
) -> None:
    runner = EncoderRunner.from_config(
        EncoderConfig(model=str(snapshot), dtype="float32", layouts=LAYOUTS[layout], token_budgets=(96, 128)), "cpu"
    )
    runner.capture()
    segments = [segment for picture in pictures for segment in runner.adapter.prepare(picture)]
    for ours, theirs in zip(runner.encode(segments), expected, strict=True):
        assert ours.shape == theirs.shape
        assert (ours - theirs).norm() / theirs.norm() < 1e-4
    assert runner.stats.hit_rate == pytest.approx({"eager": 0.0}.get(layout, runner.stats.hit_rate))
    assert layout == "eager" or runner.stats.hits > len(segments) // 2


def test_positions_matter(snapshot: Path, pictures: list[Image.Image]) -> None:
    """Guards the comparison: a model that ignored positions or the grid would be caught."""
    reference = ReferenceMiniCPMV(snapshot)
    features = torch.randn(24 * 43, 64)
    there, transposed = reference.resample(features, 24, 43), reference.resample(features, 43, 24)
    assert (there - transposed).norm() / there.norm() > 1e-2
