"""The imports of the packages, read from their source and tried in a fresh interpreter."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BELOW: dict[str, set[str]] = {"encoder": set(), "workers": {"encoder"}, "cluster": {"encoder", "workers"}}

RAY_FILES = {
    "cluster/benchmark/load.py",
    "cluster/benchmark/rates.py",
    "workers/actor.py",
    "workers/ray_metrics.py",
    "cluster/routing/router.py",
    "cluster/pool.py",
    "cluster/lifecycle/entrypoint.py",
    "cluster/lifecycle/launching.py",
    "cluster/planning/fleet.py",
    "cluster/lifecycle/places.py",
    "cluster/lifecycle/actors.py",
    "cluster/lifecycle/standing.py",
    "cluster/gateway/actor.py",
    "cluster/lookup.py",
    "cluster/streams/transport.py",
    "cluster/lifecycle/local_ray.py",
}

WITHOUT_TORCH = [
    "encoder.types",
    "encoder.video",
    "encoder.errors",
    "encoder.config",
    "encoder.headers",
    "encoder.runner_stats",
    "encoder.items",
    "encoder.snapshots",
    "encoder.media",
    "encoder.pictures",
    "encoder.packing",
    "encoder.budgets",
    *(f"encoder.adapters.{path.stem}" for path in sorted((ROOT / "encoder/adapters").glob("[a-z]*.py"))),
    "workers.cache",
    "workers.cache_keys",
    "workers.config",
    "workers.messages",
    "workers.metric_names",
    "workers.metrics",
    "workers.prometheus",
    "workers.spans",
    "cluster",
    "cluster.routing.affinity",
    "cluster.lifecycle.autoscaling",
    "cluster.cli",
    *(f"cluster.commands.{path.stem}" for path in sorted((ROOT / "cluster/commands").glob("[a-z]*.py"))),
    "cluster.config",
    "cluster.lifecycle.crew",
    "cluster.planning.forecast",
    "cluster.gateway.auth",
    "cluster.gateway.config",
    "cluster.gateway.limits",
    "cluster.gateway.statuses",
    "cluster.groups",
    "cluster.lifecycle.head",
    "cluster.planning.histogram",
    "cluster.http_client",
    "cluster.routing.leases",
    "cluster.routing.samples",
    "cluster.gateway.msgpack_reader",
    "cluster.lifecycle.nodes",
    "cluster.planning.placing",
    "cluster.planning.plan",
    "cluster.lifecycle.posts",
    "cluster.routing.assign",
    "cluster.files.sources",
    "cluster.lifecycle.stats",
    "cluster.lifecycle.status",
    "cluster.lifecycle.supervisor",
    "cluster.lifecycle.team",
    "cluster.planning.traces",
    "cluster.gateway.item_maps",
    "cluster.gateway.requests",
    "cluster.gateway.wire",
]


def files_of(layer: str) -> list[Path]:
    return sorted((ROOT / layer).rglob("*.py"))


@cache
def imports_of(file: Path) -> frozenset[str]:
    """Names of all modules that a file imports, anywhere in it, and of what it takes from them."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} imports relatively"
            names |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(names)


def packages_imported_by(layer: str) -> set[str]:
    return {name.partition(".")[0] for file in files_of(layer) for name in imports_of(file)}


def test_every_package_is_installed() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = {".".join(file.relative_to(ROOT).parts[:-1]) for layer in BELOW for file in files_of(layer)}
    assert set(settings["packages"]) == found


@pytest.mark.parametrize("layer", BELOW)
def test_imports_flow_one_way(layer: str) -> None:
    assert packages_imported_by(layer) & BELOW.keys() <= BELOW[layer] | {layer}


@pytest.mark.parametrize("layer", BELOW)
def test_no_file_imports_what_imports_it(layer: str) -> None:
    """Not in a function, and not for its types alone either: what two files both need has a file below them."""
    modules = {".".join(file.relative_to(ROOT).with_suffix("").parts): file for file in files_of(layer)}
    order = TopologicalSorter({module: modules.keys() & imports_of(file) for module, file in modules.items()})
    try:
        order.prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_ray_stays_in_the_files_that_start_or_call_actors() -> None:
    users = {
        str(file.relative_to(ROOT))
        for layer in BELOW
        for file in files_of(layer)
        if any(name.partition(".")[0] == "ray" for name in imports_of(file))
    }
    assert users <= RAY_FILES


def test_what_a_client_needs_imports_without_torch_and_ray() -> None:
    script = (
        "import sys\n"
        f"for name in {WITHOUT_TORCH!r}:\n"
        "    __import__(name)\n"
        "    loaded = {'torch', 'ray', 'transformers'} & sys.modules.keys()\n"
        "    assert not loaded, f'{name} loads {loaded}'\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
