"""The bench compares like with like: its baselines compute the same tokens, and its figures are what it measured."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from encoder.adapters.minicpmv import MiniCPMV
from encoder.adapters.qwen_vl import QwenVL
from encoder.adapters.registry import load_adapter
from encoder.benchmark import sweep
from encoder.benchmark.files import save_json
from encoder.benchmark.minicpmv import useful_flops
from encoder.benchmark.minicpmv_baselines import EagerLoop, PaddedGrids, Stock, transformers_tower
from encoder.benchmark.preparation import Preparation
from encoder.benchmark.qwen_vl import QwenLoop, make_workloads
from encoder.benchmark.report import table, write_plot
from encoder.benchmark.rows import Report, Row
from encoder.benchmark.workloads import random_sizes
from encoder.config import EncoderConfig
from encoder.pictures import draw_picture
from encoder.runner import EncoderRunner
from encoder.towers.resampler import Resampler
from encoder.weights import random_tensors

CONFIG = EncoderConfig(model="tiny-minicpmv-2.6", graphs=False)


@pytest.fixture(scope="module")
def adapter() -> MiniCPMV:
    made = load_adapter(CONFIG)
    assert isinstance(made, MiniCPMV)
    return made


@pytest.fixture(scope="module")
def stock(adapter: MiniCPMV) -> Stock:
    weights = random_tensors(adapter.weight_shapes(), CONFIG.seed)
    device = torch.device("cpu")
    tower = transformers_tower(adapter, weights, device, torch.float32)
    ours = {name: tensor for name, tensor in weights.items() if name.startswith("resampler.")}
    return Stock(adapter, tower, Resampler(ours, device, torch.float32), device)


@pytest.mark.parametrize(("width", "height"), [(640, 480), (224, 224)])
def test_baselines_compute_the_tokens_that_we_do(adapter: MiniCPMV, stock: Stock, width: int, height: int) -> None:
    image = adapter.prepare(draw_picture(width, height, 1))
    wanted = torch.cat(EncoderRunner.from_config(CONFIG, "cpu").encode(image))
    eager = EagerLoop(stock).encode(image)
    assert (eager - wanted).norm() / wanted.norm() < 1e-4
    if width == height:  # the wider one pads to 4,900 patches a slice, slow on a CPU
        padded = PaddedGrids(stock).encode(image)
        assert padded is not None
        assert (padded - wanted).norm() / wanted.norm() < 1e-4


def test_padded_grids_lift_an_image_to_its_widest_slice(adapter: MiniCPMV, stock: Stock) -> None:
    grids = PaddedGrids(stock)
    keys = [grids.key(adapter.prepare(draw_picture(*size, 0))) for size in ((448, 448), (640, 480), (4000, 100))]
    assert keys == [(32 * 32, 1), (70 * 70, 4), None]


def test_useful_work_is_that_of_the_specification(adapter: MiniCPMV) -> None:
    """One slice of the released sizes: 27 layers of 4 D^2 + 2 D M multiplications a patch, and attention over 1024."""
    full = load_adapter(EncoderConfig(model="random-minicpmv-2.6"))
    assert isinstance(full, MiniCPMV)
    flops = useful_flops(full, [full.measure((1, 32, 32))])
    layers = 27 * (2 * 1024 * (4 * 1152**2 + 2 * 1152 * 4304) + 4 * 1024**2 * 1152)
    embedding = 2 * 1024 * 588 * 1152
    resampler = 2 * 1024 * (1152 * 3584 + 2 * 3584**2) + 4 * 64 * 1024 * 3584 + 2 * 2 * 64 * 3584**2
    assert flops == layers + embedding + resampler


def test_random_sizes_repeat_and_spread() -> None:
    sizes = random_sizes(200, seed=0)
    assert sizes == random_sizes(200, seed=0)
    assert min(min(size) for size in sizes) < 100
    assert max(max(size) for size in sizes) > 3000


@pytest.fixture
def report() -> Report:
    rows = [
        Row(
            engine=engine, workload=workload, slices_per_s=rate, patches_per_s=1028 * rate, peak_share=0.5, fill=0.9,
            p50_ms=2.0, p99_ms=3.0, device_ms=1.5, to_eager=rate / 100, memory_gib=1.0,
        )
        for engine, rate in (("eager loop", 100.0), ("packed", 487.0))
        for workload in ("traffic", "448x448 alone", "video")
    ]  # fmt: skip
    return Report(
        model="m", dtype="bfloat16", device="some GPU", versions={"torch": "2"}, date="2026-01-01", peak_tflops=662.0,
        overlap=0.99, capture_seconds=3.0, capture_gib=1.7, num_graphs=14, cosines={"packed": (0.9999, 0.99995)},
        preparation=Preparation(
            pillow_ms=20.0, prepare_ms=22.0, helped_ms=14.0, images_per_s={1: 45.0, 2: 90.0}
        ),
        repeats=5, rows=rows,
    )  # fmt: skip


def test_table_and_json_carry_every_figure(report: Report, tmp_path: Path) -> None:
    text = table(report)
    assert len(text.splitlines()) == 6 + len(report.rows)
    assert "487" in text
    assert "662 TFLOP/s" in text
    save_json(report.as_dict(), tmp_path / "deep" / "report.json")
    read = json.loads((tmp_path / "deep" / "report.json").read_text())
    assert [row["slices_per_s"] for row in read["rows"]] == [row.slices_per_s for row in report.rows]
    assert math.isclose(read["overlap"], 0.99)


def test_what_was_not_measured_is_null_in_json(tmp_path: Path) -> None:
    """Strict readers take no NaN."""
    save_json({"overlap": math.nan, "rows": [{"p50_ms": math.inf}, (1.5, None)]}, tmp_path / "report.json")
    read = json.loads((tmp_path / "report.json").read_text(), parse_constant=pytest.fail)
    assert read == {"overlap": None, "rows": [{"p50_ms": None}, [1.5, None]]}


def test_plot_is_a_picture(report: Report, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write_plot(report, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_several_models_are_compared_by_their_ratios(report: Report, tmp_path: Path) -> None:
    rows = [replace(row, engine=row.engine.replace("eager loop", "eager, sdpa")) for row in report.rows]
    two = [replace(report, model="one", rows=rows), replace(report, model="another", rows=rows[:4])]
    assert sweep.table(two).splitlines() == [
        "x eager  traffic  448x448 alone  video",
        "one         4.87           4.87   4.87",
        "another     4.87",
    ]
    pytest.importorskip("matplotlib")
    sweep.write_plot(two, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("model", ["tiny-qwen2.5-vl", "tiny-qwen3-vl"])
def test_the_loop_over_transformers_qwen_computes_the_tokens_that_we_do(model: str) -> None:
    config = EncoderConfig(model=model, graphs=False)
    adapter = load_adapter(config)
    assert isinstance(adapter, QwenVL)
    weights = random_tensors(adapter.weight_shapes(), config.seed)
    loop = QwenLoop(config, adapter, weights, torch.device("cpu"), torch.float32)
    image, _, clip = (workload.images[0] for workload in make_workloads(adapter, small=True))
    runner = EncoderRunner.from_config(config, "cpu")
    for segments in (image, clip):
        wanted = torch.cat(runner.encode(segments))
        assert (loop.encode(segments) - wanted).norm() / wanted.norm() < 1e-4
