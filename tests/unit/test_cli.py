import copy
import io
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
import ray

from cluster.cli import _parser, main
from cluster.commands.arguments import DTYPES, lay_over
from cluster.config import parse_config
from cluster.planning.traces import TraceWriter
from encoder.config import Dtype
from encoder.errors import ConfigError

CONFIGS = Path(__file__).parents[2] / "configs"


def status(*arguments: str) -> int:
    try:
        return main(arguments)
    except SystemExit as leaving:  # argparse leaves by itself
        return int(leaving.code or 0)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-X", "importtime", "-m", "cluster.cli", *arguments]
    return subprocess.run(command, cwd=CONFIGS.parent, capture_output=True, text=True, check=False, timeout=60)


def test_help_answers_within_a_second_and_loads_nothing_heavy() -> None:
    seconds = []
    for _ in range(3):  # the fastest: the machine may be busy
        started_s = time.perf_counter()
        done = run("--help")
        seconds.append(time.perf_counter() - started_s)
    assert done.returncode == 0
    assert "init-checkpoint" in done.stdout
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert not loaded & {"torch", "ray", "transformers", "numpy", "PIL", "pydantic", "rich"}
    assert min(seconds) < 1.0


def test_a_directory_with_an_earlier_run_is_refused_before_anything_heavy_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "manifest.jsonl").touch()
    done = run("encode", str(tmp_path), "--out", str(tmp_path))
    assert done.returncode == 2
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert not loaded & {"torch", "ray", "transformers", "numpy", "pydantic"}


def test_a_path_that_does_not_exist_is_refused_before_anything_heavy_is_loaded(tmp_path: Path) -> None:
    done = run("encode", str(tmp_path / "gone.png"), "--out", str(tmp_path / "out"))
    assert done.returncode == 2
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert not loaded & {"torch", "ray", "transformers", "pydantic"}


@pytest.mark.parametrize(
    "command",
    [
        ["status"],
        ["top"],
        ["down"],
        ["scale", "2"],
        ["drain", "worker-0"],
        ["trace", "--out", "t.trace"],
        ["encode", "photo.png", "--out", "out"],
        ["serve"],
    ],
)
def test_every_command_takes_the_pools_name_the_same_ways(command: list[str]) -> None:
    for option in ("--pool", "--name"):
        assert _parser().parse_args([*command, option, "photos"]).pool == "photos"
    if command[0] in ("status", "top", "down", "trace"):
        assert _parser().parse_args([*command, "photos"]).pool == "photos"
        assert _parser().parse_args(command).pool is None


def test_no_trace_is_left_where_there_is_no_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENCPOOL_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert status("trace", "--out", str(tmp_path / "t.trace")) == 1
    assert not (tmp_path / "t.trace").exists()


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert status("--version") == 0
    assert capsys.readouterr().out.startswith("encpool")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "required: COMMAND"),
        (["encod"], "invalid choice: 'encod'"),
        (["encode", "photo.png"], "required: --out"),
        (["encode", "--out", "out"], "required: PATH"),
        (["encode", "gone.png", "--out", "out"], "no such file or folder: gone.png"),
        (["encode", "photo.png", "--out", "out", "--workers", "0"], "'0' is no whole number from 1"),
        (["encode", "photo.png", "--out", "out", "--dtype", "int4"], "invalid choice: 'int4'"),
        (["encode", "photo.png", "--out", "out", "--config", "gone.yaml"], "gone.yaml: cannot be read"),
        (["encode", "photo.png", "--out", "out", "--config", "typo.yaml"], "did you mean 'num_workers'?"),
        (["encode", "photo.png", "--out", "out", "--model", "tiny-minicpmv-2.7"], "did you mean 'tiny-minicpmv-2."),
        (["encode", "photo.png", "--out", "photo.png"], "cannot write to photo.png"),
        (["encode", "photo.png", "--out", "used"], "--overwrite"),
        (["encode", "photo.png", "--out", "out", "--pool", "p", "--dtype", "auto"], "--dtype cannot change a pool"),
        (["encode", "photo.png", "--out", "used", "--pool", "nowhere"], "--overwrite"),  # before it is looked for
        (["encode", "photo.png", "--out", "used", "--url", "http://127.0.0.1:1"], "--overwrite"),
        (["status", "one", "--pool", "other"], "not allowed with argument"),
        (["up"], "required: --config"),
        (["up", "--config", "good.yaml", "--name", "a.b"], "up: name: string should match pattern"),
        (["scale", "few"], "'few' is no whole number"),
        (["config"], "required: ACTION"),
        (["bench"], "required: SUBJECT"),
        (["bench", "engine", "--repeats", "few"], "no whole number"),
        (["config", "check", "typo.yaml"], "unknown key 'num_worker'"),
        (["config", "check", "budget.yaml"], "token budget"),
        (["config", "check", "fp8.yaml"], "tiny-siglip has no precision 'fp8'; leave it out"),
        (["config", "check", "axis.yaml"], "capture axis 'layout' has no keys"),
        (["init-checkpoint", "tiny-minicpmv-2.6", "used"], "not an empty directory"),
        (["init-checkpoint", "nothing", "new"], "no model 'nothing'"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(
    arguments: list[str],
    said: str,
    save_picture: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = save_picture("photo.png").parent
    monkeypatch.chdir(folder)
    (folder / "typo.yaml").write_text("num_worker: 2\nworker: {encoder: {model: tiny-minicpmv-2.6}}\n")
    encoder = "num_workers: 1\nworker: {encoder: {model: tiny-minicpmv-2.6, %s}}\n"
    (folder / "good.yaml").write_text(encoder % "seed: 0")
    (folder / "budget.yaml").write_text(encoder % "token_budgets: [0]")
    (folder / "axis.yaml").write_text(encoder % "layouts: []")
    (folder / "fp8.yaml").write_text(encoder.replace("minicpmv-2.6", "siglip") % "precision: fp8")
    (folder / "used").mkdir()
    (folder / "used" / "manifest.jsonl").touch()
    assert status(*arguments) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""


def test_every_shipped_configuration_passes_the_check(capsys: pytest.CaptureFixture[str]) -> None:
    files = sorted(CONFIGS.glob("*.yaml"))
    assert files
    for file in files:
        assert status("config", "check", str(file)) == 0
        assert "graphs a worker" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("worker", "encoder", "numbers"),
    [
        ("", "", "in bfloat16 on cuda or in float32 on cpu"),
        ("device: cpu, ", "", "in float32 on cpu"),
        ("device: cuda, ", ", dtype: float16", "in float16 on cuda"),
    ],
)
def test_the_check_says_in_which_numbers_a_worker_will_compute(
    tmp_path: Path, worker: str, encoder: str, numbers: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "pool.yaml"
    config.write_text(f"num_workers: 2\nworker: {{{worker}encoder: {{model: tiny-minicpmv-2.6{encoder}}}}}\n")
    assert status("config", "check", str(config)) == 0
    assert f"2 x tiny-minicpmv-2.6 {numbers}, " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ("gateway: {tokens_file: none}", "gateway.tokens_file: none cannot be read: "),
        ("gateway: {tokens_file: folder}", "gateway.tokens_file: folder cannot be read: "),
        ("gateway: {tokens_file: short}", "short:1: a line is a name, a token of 16 letters at least"),
        ("trace_file: none/day.trace", "none/day.trace: cannot write a trace: there is no folder none"),
        ("trace_file: short/day.trace", "short/day.trace: cannot write a trace: "),
        ("trace_file: folder", "folder: cannot write a trace: Is a directory"),
        ("trace_file: short", "short is no trace of version 1"),
        ("trace_file: locked.trace", "locked.trace: cannot write a trace: Permission denied"),
        ("trace_file: locked/day.trace", "locked/day.trace: cannot write a trace: Permission denied"),
    ],
)
def test_the_check_finds_files_that_a_start_would_stumble_over(
    section: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "short").write_text("me 123\n")
    (tmp_path / "locked.trace").touch(mode=0o444)
    (tmp_path / "locked").mkdir(mode=0o555)
    # For root too, who may write everywhere.
    monkeypatch.setattr("os.access", lambda path, mode: bool(Path(path).stat().st_mode & 0o222))
    (tmp_path / "pool.yaml").write_text(f"num_workers: 1\nworker: {{encoder: {{model: tiny-siglip}}}}\n{section}\n")
    assert status("config", "check", "pool.yaml") == 2
    captured = capsys.readouterr()
    assert f"pool.yaml: {said}" in captured.err
    assert captured.out == ""


def test_the_check_leaves_files_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tokens").write_text("me 0123456789abcdef\n")
    (tmp_path / "pool.yaml").write_text(
        "num_workers: 1\nworker: {encoder: {model: tiny-siglip}}\ntrace_file: a.trace\ngateway: {tokens_file: tokens}\n"
    )
    assert status("config", "check", "pool.yaml") == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pool.yaml", "tokens"]
    TraceWriter(tmp_path / "a.trace").close()
    assert status("config", "check", "pool.yaml") == 0
    assert "0123456789abcdef" not in capsys.readouterr().out


def test_models_lists_the_presets(capsys: pytest.CaptureFixture[str]) -> None:
    assert status("models") == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("tiny-minicpmv-2.6 ") for line in lines)
    takes = {line.split()[0]: line.split()[2] for line in lines if line}
    assert takes["tiny-minicpmv-2.6"] == "image/video"
    assert takes["tiny-minicpmv-2.5"] == takes["tiny-siglip"] == "image"


def test_init_checkpoint_writes_what_config_check_accepts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    snapshot = tmp_path / "snapshot"
    assert status("init-checkpoint", "tiny-minicpmv-4.0", str(snapshot), "--seed", "7") == 0
    assert "seed 7" in capsys.readouterr().out
    config = tmp_path / "pool.yaml"
    config.write_text(f"num_workers: 1\nworker: {{encoder: {{model: {snapshot}}}}}\n")
    assert status("config", "check", str(config)) == 0


def test_a_checkpoint_without_its_weights_is_wrong_usage_before_a_pool_is_started(
    tmp_path: Path, save_picture: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    had_ray = ray.is_initialized()
    snapshot, config = tmp_path / "snapshot", tmp_path / "pool.yaml"
    assert status("init-checkpoint", "tiny-siglip", str(snapshot)) == 0
    config.write_text(f"num_workers: 1\nworker: {{encoder: {{model: {snapshot}}}}}\n")
    for name, said in (
        ("model-00001-of-00001.safetensors", "model-00001-of-00001.safetensors is missing, which model.safetensors.in"),
        ("model.safetensors.index.json", "holds neither model.safetensors.index.json"),
    ):
        (snapshot / name).unlink()
        encode = ["encode", str(save_picture("a.png")), "--out", str(tmp_path / "out"), "--config", str(config)]
        for command in (["config", "check", str(config)], encode):
            assert status(*command) == 2
            assert said in capsys.readouterr().err
    assert ray.is_initialized() == had_ray


def test_dtypes_are_those_of_the_configuration() -> None:
    assert get_args(Dtype) == DTYPES


def test_options_count_for_what_groups_say_of_their_own_too() -> None:
    groups = [
        {"name": "one", "num_workers": 1, "worker": {"encoder": {"model": "a", "dtype": "float32"}}},
        {"name": "other", "num_workers": 1, "worker": {"device": "cpu"}},
    ]
    for values in ({"worker": {"encoder": {"model": "a"}}, "groups": groups}, {"groups": groups[:1]}):
        given = copy.deepcopy(values)
        lay_over(given, model=None, dtype=None)
        assert given == values
        lay_over(given, model="b", dtype="float16")
        config = parse_config(given, source="test")
        sections = [config.worker.encoder, *(group.worker.encoder for group in config.worker_groups)]
        assert {(one.model, one.dtype) for one in sections} == {("b", "float16")}


def test_a_model_is_not_laid_over_several() -> None:
    other = {"name": "other", "num_workers": 1, "worker": {"encoder": {"model": "c"}}}
    values = {"worker": {"encoder": {"model": "a"}}, "groups": [{"name": "one", "num_workers": 1}, other]}
    with pytest.raises(ConfigError, match="--model cannot change several models, a, c; leave it out"):
        lay_over(values, model="b")


def test_names_that_stdout_cannot_show_are_escaped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "caf\udce9-é.yaml"
    config.write_text("num_workers: 1\nworker: {device: cpu, encoder: {model: tiny-minicpmv-2.6}}\n")
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii", errors="strict"))
    assert main(["config", "check", str(config)]) == 0
    assert rb"caf\udce9-\xe9.yaml: ok" in shown.getvalue()
