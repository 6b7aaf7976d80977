"""Configuration files: loaded, or refused with a message that helps."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cluster.config import load_config
from encoder.errors import ConfigError

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
GOOD = "num_workers: 2\nworker: {encoder: {model: tiny-minicpmv-2.6}}\n"


def refusal(tmp_path: Path, text: str) -> str:
    path = tmp_path / "pool.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    return str(caught.value)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_config_we_ship_loads_and_is_commented(path: Path) -> None:
    assert load_config(path).num_workers >= 1
    assert path.read_text().startswith("#")


def test_we_ship_the_three_configs_of_the_readme() -> None:
    names = {path.name for path in CONFIGS}
    assert {"tiny-cpu.yaml", "one-gpu-minicpmv-2.6.yaml", "two-gpu-minicpmv-2.6.yaml"} <= names


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD.replace("num_workers", "num_worker"), "unknown key 'num_worker', did you mean 'num_workers'?"),
        (GOOD.replace("encoder", "encodr"), "unknown key 'worker.encodr', did you mean 'worker.encoder'?"),
        (
            GOOD.replace("model:", "modle:"),
            "unknown key 'worker.encoder.modle', did you mean 'worker.encoder.model'?",
        ),
        (GOOD + "zzz: 1\n", "unknown key 'zzz', known here: num_workers, worker"),
        ("num_workers: 2\n", "key 'worker' is missing"),
        (GOOD.replace("2\n", "two\n"), "num_workers: input should be a valid integer"),
        (GOOD.replace("2\n", "0\n"), "num_workers: input should be greater than or equal to 1, got 0"),
        (GOOD + "start_timeout_s: .inf\n", "start_timeout_s: input should be less than or equal to 1000000, got inf"),
        (GOOD + "cpus_per_worker: .inf\n", "cpus_per_worker: input should be less than or equal to"),
        (GOOD + "silent_timeout_s: 0.5\n", "silent_timeout_s: must be above worker.report_interval_s, which is 1"),
        (GOOD.replace("worker: {", "worker: {report_interval_s: 60, "), "silent_timeout_s: must be above"),
        (GOOD.replace("worker: {", "worker: {replays_in_flight: 4, "), "less than or equal to 3, got 4"),
        (GOOD.replace("2.6}", "2.6, token_budgets: {packed: 64}}"), "worker.encoder.token_budgets"),
        (GOOD + "worker: [", "pool.yaml: not YAML: "),
        ("", "a configuration is a map of keys such as 'num_workers: 2', got nothing"),
        ("- 1\n", "got a list"),
    ],
)
def test_a_config_that_cannot_work_is_refused_with_help(tmp_path: Path, text: str, message: str) -> None:
    refused = refusal(tmp_path, text)
    assert message in refused
    assert refused.startswith("pool.yaml: ")


def test_a_missing_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "none.yaml")


def test_import_cluster_is_light() -> None:
    code = "import cluster, cluster.config, sys; print({'ray', 'torch'} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "set()"
