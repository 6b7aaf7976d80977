"""`encpool plan`: from a recorded trace to a table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from cluster.cli import main
from cluster.config import parse_config
from cluster.planning.trace_costs import costs_of, label_of, read_models
from cluster.planning.traces import TraceRecord, TraceWriter
from encoder.adapters.minicpmv import MiniCPMV
from encoder.adapters.registry import load_adapter
from encoder.config import EncoderConfig
from encoder.pictures import TRAFFIC_SIZES
from encoder.types import Grid

MODEL = "tiny-minicpmv-2.6"
SLICE: Grid = (1, 32, 32)
Recorder = Callable[..., Path]


@pytest.fixture
def recorded(tmp_path: Path) -> Recorder:
    """A trace of the usual sizes, a hundred items a second, all in one graph."""

    def record(
        *, model: str = MODEL, graphs: tuple[str, ...] = (f"{MODEL}@bfloat16/image[packed]/640",), ms: float = 22.0,
        name: str = "trace",
    ) -> Path:  # fmt: skip
        adapter = load_adapter(EncoderConfig(model=MODEL))
        assert isinstance(adapter, MiniCPMV)
        path = tmp_path / name
        with TraceWriter(path) as writer:
            for number in range(201):
                width, height = TRAFFIC_SIZES[number % 20]
                plan = adapter.plan(width, height)
                slices = 1 + plan.columns * plan.rows
                writer.write(
                    TraceRecord(
                        time_s=1.7e9 + number / 100, model=model, grids=(SLICE,) * slices,
                        graphs=graphs, misses=() if graphs else ("graphs_off",), ms=ms,
                    )
                )  # fmt: skip
        return path

    return record


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", *arguments]) == 0
    return capsys.readouterr().out


def test_the_table_names_sets_rates_and_time_saved(recorded: Recorder, capsys: pytest.CaptureFixture[str]) -> None:
    told = planned(capsys, "--trace", str(recorded()), "--workers", "4", "--memory-gib", "1")
    assert f"{MODEL}: 201 items of 8 kinds in 2 s" in told
    assert "costs: 1 graph as in the trace" in told
    assert "0-3" in told
    assert "image[packed]/" in told
    for row in ("this plan", "the same on each", "no graphs", "token budgets for such items alone: 64,"):
        assert row in told


def test_the_traffic_that_it_found_can_be_pasted_into_a_configuration(
    recorded: Recorder, capsys: pytest.CaptureFixture[str]
) -> None:
    told = planned(capsys, "--trace", str(recorded()), "--workers", "4", "--memory-gib", "1")
    pasted = yaml.safe_load(told.rstrip().splitlines()[-1])
    pasted["worker"]["encoder"]["model"], pasted["num_workers"] = MODEL, 1
    traffic = parse_config(pasted, source="pasted").worker.encoder.traffic
    assert traffic is not None
    assert sum(traffic.values()) == 201


def test_too_little_memory_plans_nothing_and_says_so(recorded: Recorder, capsys: pytest.CaptureFixture[str]) -> None:
    told = planned(capsys, "--trace", str(recorded()), "--workers", "2", "--memory-gib", "0.001")
    assert "none: everything runs eagerly" in told


def test_layouts_and_model_come_from_a_configuration(
    recorded: Recorder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "pool.yaml"
    config.write_text(f"num_workers: 1\nworker: {{encoder: {{model: {MODEL}, layouts: [packed, 32x32]}}}}\n")
    told = planned(
        capsys, "--trace", str(recorded()), "--workers", "2", "--memory-gib", "4", "--config", str(config)
    )  # fmt: skip
    assert "image[32x32]/" in told
    assert "token budgets for" not in told  # there is more than one ladder


def test_times_of_the_trace_are_the_costs(recorded: Recorder) -> None:
    adapter = load_adapter(EncoderConfig(model=MODEL))
    by_graph = costs_of(read_models(recorded())[MODEL], adapter)
    assert by_graph.by_label == {"image[packed]/640": 22.0}
    assert by_graph.ms_per_patch == pytest.approx((22.0 - 0.4) / adapter.capacity(("packed",), 640).patches)
    eagerly = costs_of(read_models(recorded(graphs=(), ms=5.0, name="eager"))[MODEL], adapter)
    assert not eagerly.by_label
    assert eagerly.eager.ms_per_patch == pytest.approx(5.0 / (7 * 1024), rel=0.5)
    assert "assumed" in eagerly.source
    slowly = costs_of(read_models(recorded(graphs=(), ms=2000.0, name="slow"))[MODEL], adapter)
    assert "eager 217 us" in slowly.source  # microseconds, without an exponent
    assert "e+" not in slowly.source


def test_a_label_is_a_key_without_its_encoder() -> None:
    assert label_of("m@bfloat16/image[24x43]/512") == "image[24x43]/512"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "random-minicpmv-2.6"], "has no items of random-minicpmv-2.6, only of tiny-minicpmv-2.6"),
        (["--model", "nothing"], "no model 'nothing'"),
        (["--memory-gib", "0"], "'0' is no number above 0"),
        (["--memory-gib", "much"], "'much' is no number above 0"),
        (["--workers", "0"], "'0' is no whole number from 1"),
        (["--workers", "100000000"], "100000000 workers are more than the 4096 that a pool may have"),
    ],
)
def test_what_cannot_be_planned_is_one_line_and_status_2(
    arguments: list[str], said: str, recorded: Recorder, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["plan", "--trace", str(recorded()), "--workers", "2", "--memory-gib", "1", *arguments]
    try:
        status = main(command)
    except SystemExit as leaving:
        status = int(leaving.code or 0)
    assert status == 2
    assert said in capsys.readouterr().err


def test_of_several_models_one_has_to_be_named(recorded: Recorder, capsys: pytest.CaptureFixture[str]) -> None:
    path = recorded()
    recorded(model="random-minicpmv-2.6")
    command = ["plan", "--trace", str(path), "--workers", "1", "--memory-gib", "1"]
    assert main(command) == 2
    assert "choose one with --model" in capsys.readouterr().err
    assert f"{MODEL}: 201 items" in planned(capsys, *command[1:], "--model", MODEL)


def test_each_model_of_a_configuration_is_offered_its_own_layouts_and_budgets(
    recorded: Recorder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, config, other = recorded(), tmp_path / "pool.yaml", "tiny-minicpmv-2.5"
    config.write_text(
        "groups:\n"
        f"  - {{name: a, num_workers: 1, worker: {{encoder: {{model: {other}, token_budgets: [96]}}}}}}\n"
        f"  - {{name: b, num_workers: 1, worker: {{encoder: {{model: {MODEL}, token_budgets: [128, 640]}}}}}}\n"
    )
    command = ["--trace", str(path), "--workers", "1", "--memory-gib", "1", "--config", str(config)]
    assert "image[packed]/128,640\n" in planned(capsys, *command)  # the only one of them in the trace
    assert "image[packed]/128,640\n" in planned(capsys, *command, "--model", MODEL)
    recorded(model=other)
    assert main(["plan", *command]) == 2
    assert f"choose one with --model: {other}, {MODEL}" in capsys.readouterr().err
    assert "image[packed]/96\n" in planned(capsys, *command, "--model", other)
    assert main(["plan", *command, "--model", "tiny-siglip"]) == 2
    assert f"no model 'tiny-siglip' in {config}; it has {other}, {MODEL}" in capsys.readouterr().err
