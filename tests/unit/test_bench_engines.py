"""`encpool bench engine`, as it is run on a GPU, to the end for every family: tables and JSON, several at once."""

from __future__ import annotations

import json
import logging
import math
from importlib.util import find_spec
from pathlib import Path

import pytest

from cluster.cli import main
from encoder.adapters.registry import families
from encoder.benchmark.engine import bench_engines
from encoder.config import EncoderConfig
from encoder.errors import ConfigError

# One of each that has a path of its own through the bench. DeepSeek-OCR 2 takes ten times as long as all others on
# transformers' modules; `test_bench_stock.py` has its loop.
TWINS = ("tiny-minicpmv-2.5", "tiny-minicpmv-2.6", "tiny-minicpmv-4.0", "tiny-qwen2-vl", "tiny-qwen3-vl-moe")
MODELS = [
    preset
    for family in families().values()
    for preset in family.presets
    if preset.startswith("tiny-") and preset not in (*TWINS, "tiny-deepseek-ocr-2")
]


def test_every_family_is_measured_to_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--device", "cpu", "--repeats", "1", "--json", str(tmp_path / "sweep.json")]
    models = [argument for model in MODELS for argument in ("--model", model)]
    assert main(["bench", "engine", *models, *options]) == 0
    printed = capsys.readouterr().out
    assert [line.split()[0] for line in printed.splitlines()[-len(MODELS) :]] == MODELS
    reports = json.loads((tmp_path / "sweep.json").read_text())["reports"]
    assert [report["model"] for report in reports] == MODELS
    for report in reports:
        assert f"{report['model']}, float32, on" in printed
        assert report["num_graphs"] > 0
        assert all(least > 0.9999 for least, _ in report["cosines"].values())
        for row in report["rows"]:
            figures = [row[name] for name in ("slices_per_s", "peak_share", "fill", "p50_ms", "device_ms")]
            assert all(math.isfinite(figure) and figure > 0 for figure in figures), row


def test_a_model_that_fails_leaves_the_others_their_figures(caplog: pytest.LogCaptureFixture) -> None:
    no_gpu = EncoderConfig(model="tiny-siglip2", attention="triton")
    with caplog.at_level(logging.ERROR):
        results = dict(bench_engines([no_gpu, EncoderConfig(model="tiny-clip")], "cpu", repeats=1))
    assert results["tiny-siglip2"] is None
    assert "the bench of tiny-siglip2 failed" in caplog.text
    assert results["tiny-clip"] is not None


def test_a_model_that_nobody_knows_is_told_before_the_first_is_measured() -> None:
    with pytest.raises(ConfigError, match="tiny-clap"):
        next(bench_engines([EncoderConfig(model="tiny-clip"), EncoderConfig(model="tiny-clap")], "cpu"))


@pytest.mark.parametrize("model", ["tiny-minicpmv-4.0", "tiny-qwen3-vl", "tiny-clip"])
@pytest.mark.parametrize("only", ["alone", "traffic"])
def test_some_workloads_are_measured_without_the_others(model: str, only: str, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    options = ["--device", "cpu", "--repeats", "1", "--only", only, "--json", str(file)]
    if find_spec("matplotlib"):
        options += ["--plot", str(tmp_path / "bench.png")]
    assert main(["bench", "engine", "--model", model, *options]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert rows
    assert all(only in row["workload"] for row in rows)


def test_a_workload_that_there_is_not_is_named_with_those_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "engine", "--model", "tiny-clip", "--device", "cpu", "--only", "noise"]) == 2
    assert "no workload is called 'noise'; there are 'traffic', '448x448 alone'" in capsys.readouterr().err
