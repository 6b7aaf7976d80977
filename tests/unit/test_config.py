"""Configuration files: loaded, or refused with a message that helps."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel, ByteSize

from cluster.config import PoolConfig, load_config
from cluster.gateway.config import GatewayConfig, MediaUrlConfig
from cluster.groups import AutoscaleConfig, GroupConfig
from cluster.planning.replan_config import ReplanConfig
from encoder.config import EncoderConfig, VideoConfig
from encoder.errors import ConfigError
from workers.config import WorkerConfig

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
GOOD = "num_workers: 2\nworker: {encoder: {model: tiny-minicpmv-2.6}}\n"
GROUPS = """
worker: {encoder: {model: tiny-minicpmv-2.6, seed: 7}, max_queue_ms: 100}
cpus_per_worker: 2
groups:
  - {name: gpu, num_workers: 2, worker: {device: cuda}}
  - {name: cpu, num_workers: 1, worker: {encoder: {dtype: float32}}, cpus_per_worker: 8}
"""


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
        (
            GOOD + "worker.encoder.traffic: {64: 4}\n",
            "unknown key 'worker.encoder.traffic': keys are not joined by dots, "
            "write 'worker: {encoder: {traffic: ...}}'",
        ),
        (GOOD + "worker.encoder.zzz: 1\n", "unknown key 'worker.encoder.zzz', known here: "),
        (GOOD + "zzz: 1\n", "unknown key 'zzz', known here: num_workers, worker"),
        (GOOD + "max_pixels: 9\n", "unknown key 'max_pixels', did you mean 'worker.encoder.max_pixels'?"),
        (GOOD + "encoder: {max_pixels: 9}\n", "unknown key 'encoder', did you mean 'worker.encoder'?"),
        (GOOD.replace("worker: {", "worker: {port: 1, "), "unknown key 'worker.port', did you mean 'gateway.port'?"),
        (GOOD + "num_workers: 3\n", "key 'num_workers' stands there twice"),
        (GOOD.replace("2.6}", "2.6, precision: fp8}, device: cpu"), "worker.device: encoder.precision fp8 needs a"),
        (GOOD.replace("2.6}", "2.6, attention: cudnn}, device: cpu"), "worker.device: encoder.attention cudnn needs a"),
        (GOOD.replace("2.6}", "2.6, precision: fp8, dtype: float16}"), "precision: goes with dtype bfloat16, not"),
        ("num_workers: 2\n", "key 'worker' is missing"),
        (GOOD.replace("2\n", "two\n"), "num_workers: input should be a valid integer"),
        (GOOD.replace("2\n", "0\n"), "num_workers: input should be greater than or equal to 1, got 0"),
        (GOOD + "start_timeout_s: .inf\n", "start_timeout_s: input should be less than or equal to 1000000, got inf"),
        (GOOD + "cpus_per_worker: .inf\n", "cpus_per_worker: input should be less than or equal to"),
        (GOOD + "gpu_share: 2\n", "gpu_share: input should be less than or equal to 1, got 2"),
        (
            GROUPS.replace("cpus_per_worker: 8", "gpu_share: 2"),
            "groups.1.gpu_share: input should be less than or equal",
        ),
        (GOOD + "cpus_per_worker: 5000\n", "cpus_per_worker: input should be less than or equal to 4096, got 5000"),
        (GOOD + "silent_timeout_s: 0.5\n", "silent_timeout_s: must be above worker.report_interval_s, which is 1"),
        (GOOD.replace("worker: {", "worker: {report_interval_s: 60, "), "silent_timeout_s: must be above"),
        (GOOD.replace("worker: {", "worker: {replays_in_flight: 4, "), "less than or equal to 3, got 4"),
        (
            GOOD.replace("2.6}", "2.6, video: {fps: 1000}}"),
            "worker.encoder.video.fps: input should be less than or equal to 240, got 1000",
        ),
        (GOOD.replace("2.6}", "2.6, token_budgets: {packed: 64}}"), "worker.encoder.token_budgets"),
        (GOOD + "worker: [", "pool.yaml: not YAML: "),
        (GOOD + "worker: " + "[" * 5000, "pool.yaml: not YAML: maximum recursion depth exceeded"),
        (
            GOOD + "resources: {disk: .nan}\n",
            "resources.disk: input should be greater than or equal to 0, got nan",
        ),
        (GOOD + "resources: {disk: -1}\n", "resources.disk: input should be greater than or equal to 0, got -1"),
        (GOOD + "resources: {CPU: 1}\n", "resources: 'CPU' is no custom resource of a cluster; say cpus_per_worker"),
        (GOOD + "resources: {memory: 1}\n", "resources: 'memory' is no custom resource of a cluster; leave it out"),
        (GOOD + "cpus_per_worker: 0.00001\n", "cpus_per_worker: must be 0, or 0.0001 at least: Ray counts no finer"),
        (GOOD + "gateway: {num_cpus: 0.00001}\n", "gateway.num_cpus: must be 0, or 0.0001 at least"),
        (GROUPS.replace("cpus_per_worker: 8", "gpu_share: 0.00001"), "groups.1.gpu_share: must be 0, or 0.0001 at"),
        (GROUPS + "  - {name: gpu, num_workers: 1}\n", "groups: each needs a name of its own, these are gpu, cpu, gpu"),
        (GROUPS + "num_workers: 4\n", "groups: they have 3 workers together, num_workers says 4; leave that out"),
        (GROUPS.replace("dtype", "dtyp"), "unknown key 'groups.1.worker.encoder.dtyp', did you mean"),
        (GROUPS.replace("name: gpu", "nam: gpu"), "unknown key 'groups.0.nam', did you mean 'groups.0.name'?"),
        (GROUPS.replace("gpu,", "GPU-1,"), "groups.0.name: string should match pattern"),
        (
            GOOD + "autoscale: {min_workers: 3, max_workers: 2}\n",
            "autoscale: min_workers must not be above max_workers",
        ),
        (GOOD + "groups: [2]\n", "groups.0: input should be a map of keys, got 2"),
        (GOOD.replace("worker: {", "worker:\nx: {"), "worker: input should be a map of keys, got None"),
        (GOOD + "gateway: {media_urls: {hosts: a.org}}\n", "gateway.media_urls.hosts: input should be a list, got"),
        (GOOD.replace("2.6}", "2.6, token_budgets: 64}"), "worker.encoder.token_budgets: input should be a list, got"),
        (GOOD + "replan: {enabled: maybe}\n", "replan.enabled: input should be 'auto', got 'maybe'"),
        (GOOD + "max_in_flight_bytes: lots\n", "a number of bytes, such as 268435456 or 256MiB, got 'lots'"),
        ("", "a configuration is a map of keys such as 'num_workers: 2', got nothing"),
        ("- 1\n", "got a list"),
    ],
)
def test_a_config_that_cannot_work_is_refused_with_help(tmp_path: Path, text: str, message: str) -> None:
    refused = refusal(tmp_path, text)
    assert message in refused
    assert refused.startswith("pool.yaml: ")


def test_every_bound_of_a_field_counts() -> None:
    """Of two of a kind, one in a type and one where the type is used, pydantic takes the type's."""
    models: tuple[type[BaseModel], ...] = (
        PoolConfig, GroupConfig, AutoscaleConfig, ReplanConfig, GatewayConfig, MediaUrlConfig,
        WorkerConfig, EncoderConfig, VideoConfig,
    )  # fmt: skip
    for model in models:
        for name, field in model.model_fields.items():
            kinds = [type(bound) for bound in field.metadata]
            assert len(set(kinds)) == len(kinds), f"{model.__name__}.{name}"


def test_bytes_are_a_number_or_a_size_wherever_they_are_asked_for(tmp_path: Path) -> None:
    models: tuple[type[BaseModel], ...] = (PoolConfig, WorkerConfig, EncoderConfig, VideoConfig, GatewayConfig)
    for model in models:
        sizes = {name: field.annotation for name, field in model.model_fields.items() if name.endswith("_bytes")}
        assert sizes
        assert set(sizes.values()) == {ByteSize}, model
    path = tmp_path / "pool.yaml"
    path.write_text(GOOD + "gateway: {max_request_bytes: 256MiB, max_open_bytes: 1000}\n")
    gateway = load_config(path).gateway
    assert (gateway.max_request_bytes, gateway.max_open_bytes) == (256 * 2**20, 1000)


def test_a_missing_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "none.yaml")


def test_import_cluster_is_light() -> None:
    code = "import cluster, cluster.config, sys; print({'ray', 'torch'} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "set()"


def test_a_group_inherits_key_by_key_what_it_does_not_say(tmp_path: Path) -> None:
    path = tmp_path / "pool.yaml"
    path.write_text(GROUPS)
    config = load_config(path)
    gpu, cpu = config.worker_groups
    assert (config.num_workers, gpu.num_workers, cpu.num_workers) == (3, 2, 1)
    assert (gpu.worker.device, cpu.worker.device) == ("cuda", "auto")
    assert (gpu.worker.encoder.dtype, cpu.worker.encoder.dtype) == ("auto", "float32")
    assert {group.worker.encoder.seed for group in config.worker_groups} == {7}
    assert {group.worker.max_queue_ms for group in config.worker_groups} == {100.0}
    assert (gpu.cpus_per_worker, cpu.cpus_per_worker) == (2.0, 8.0)
    assert PoolConfig.model_validate(config.model_dump()) == config


def test_groups_with_workers_of_their_own_need_no_common_section() -> None:
    groups = [{"name": name, "num_workers": 1, "worker": {"encoder": {"model": name}}} for name in ("one", "other")]
    config = PoolConfig.model_validate({"groups": groups})
    assert [group.worker.encoder.model for group in config.worker_groups] == ["one", "other"]
    assert config.worker.encoder.model == "one"


def test_without_groups_the_top_level_is_the_only_one(tmp_path: Path) -> None:
    path = tmp_path / "pool.yaml"
    path.write_text(GOOD + "gpu_share: 0.5\nautoscale: {min_workers: 1, max_workers: 4}\n")
    (group,) = load_config(path).worker_groups
    assert (group.name, group.num_workers, group.gpu_share) == ("worker", 2, 0.5)
    assert group.autoscale is not None
    assert group.autoscale.max_workers == 4
    path.write_text(GOOD + "autoscale: {min_workers: 3, max_workers: 4}\n")
    with pytest.raises(ConfigError, match="autoscale: num_workers must be 3 to 4, it is 2"):
        load_config(path)


TWO_MODELS = """
worker: {device: cpu}
groups:
  - {name: small, num_workers: 1, worker: {encoder: {model: tiny-siglip}}}
  - {name: large, num_workers: 2, worker: {encoder: {model: tiny-minicpmv-2.6, max_slice_nums: 4}}}
  - {name: exact, num_workers: 1, worker: {encoder: {model: tiny-minicpmv-2.6, max_slice_nums: 4, dtype: float32}}}
"""


def test_groups_may_have_models_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "pool.yaml"
    path.write_text(TWO_MODELS)
    config = load_config(path)
    assert list(config.encoders) == ["tiny-siglip", "tiny-minicpmv-2.6"]
    assert config.num_workers == 4
    assert config.encoders["tiny-minicpmv-2.6"].max_slice_nums == 4


def test_groups_of_one_model_agree_on_what_it_computes(tmp_path: Path) -> None:
    text = TWO_MODELS.replace("max_slice_nums: 4, dtype", "max_slice_nums: 9, dtype")
    message = refusal(tmp_path, text)
    assert "large and exact have the same model and must agree on worker.encoder.max_slice_nums" in message
