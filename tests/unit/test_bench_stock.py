"""The bench of families on transformers' modules: its loops compute our tokens, and it counts the work there is."""

from __future__ import annotations

import pytest
import torch

from encoder.adapters.grids import GridAdapter
from encoder.adapters.registry import load_adapter
from encoder.adapters.tiles import TileAdapter
from encoder.benchmark.stock import EagerLoop
from encoder.benchmark.workloads import image_workloads
from encoder.config import EncoderConfig
from encoder.pictures import draw_picture
from encoder.runner import EncoderRunner
from encoder.towers.stock import Attending, GridModel
from encoder.weights import random_tensors


@pytest.mark.parametrize(
    ("model", "attending"), [("tiny-siglip", "alone"), ("tiny-pixtral", "alone"), ("tiny-lfm2-vl", "ragged")]
)
@torch.inference_mode()
def test_the_loop_computes_the_tokens_that_we_do(model: str, attending: Attending) -> None:
    config = EncoderConfig(model=model, graphs=False)
    adapter = load_adapter(config)
    weights, device = random_tensors(adapter.weight_shapes(), config.seed), torch.device("cpu")
    runner = EncoderRunner.from_config(config, "cpu")
    if isinstance(adapter, TileAdapter):
        loop = EagerLoop(adapter, adapter.build(weights, device, torch.float32, "sdpa", "native"), device)
    else:
        assert isinstance(adapter, GridAdapter)
        grid_model = GridModel(adapter.family, weights, device, torch.float32, "sdpa", attending=attending)
        loop = EagerLoop(adapter, grid_model, device)
    for workload in image_workloads(adapter, lambda shapes: 1.0, small=True):
        for image in workload.images:
            ours, theirs = torch.cat(runner.encode(image)), loop.encode(image)
            assert (ours - theirs).norm() / ours.norm() < 1e-4


@torch.inference_mode()
def test_the_loop_runs_each_view_of_an_image() -> None:
    config = EncoderConfig(model="tiny-deepseek-ocr-2", graphs=False)
    adapter = load_adapter(config)
    assert isinstance(adapter, TileAdapter)
    weights, device = random_tensors(adapter.weight_shapes(), config.seed), torch.device("cpu")
    loop = EagerLoop(adapter, adapter.build(weights, device, torch.float32, "sdpa", "native"), device)
    image = adapter.prepare(draw_picture(400, 800, 1))
    assert {segment.shape.num_tokens for segment in image} == {144, 257}
    ours, theirs = torch.cat(EncoderRunner.from_config(config, "cpu").encode(image)), loop.encode(image)
    assert (ours - theirs).norm() / ours.norm() < 1e-4


@torch.inference_mode()
def test_work_is_counted_as_layers_do_it() -> None:
    """Pixtral's tiny tower: four projections and a gated MLP a layer, attention over the patches of the image."""
    config = EncoderConfig(model="tiny-pixtral")
    adapter = load_adapter(config)
    assert isinstance(adapter, GridAdapter)
    weights = random_tensors(adapter.weight_shapes(), 0)
    model = GridModel(adapter.family, weights, torch.device("cpu"), torch.float32, "sdpa", attending="alone")
    flops_of = EagerLoop(adapter, model, torch.device("cpu")).flops_of()
    patches, width, mlp = 40, 64, 128
    layers = 2 * (2 * patches * (4 * width**2 + 3 * width * mlp) + 4 * patches**2 * width)
    ends = 2 * patches * (16 * 16 * 3 * width + 2 * width * width)
    assert flops_of([adapter.measure((1, 4, 10))]) == pytest.approx(
        layers + ends, rel=1e-3
    )  # some versions turn positions to angles by a product
