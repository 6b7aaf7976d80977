"""The command as a person runs it: a process of its own, with a Ray of its own or one that RAY_ADDRESS names."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from clips import make_clip
from fakes import heed_interrupts
from ray.cluster_utils import Cluster
from safetensors import safe_open

ROOT = Path(__file__).parents[2]


def start(*arguments: str, ray_address: str | None = None) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "cluster.cli", *arguments]
    env = os.environ if ray_address is None else {**os.environ, "RAY_ADDRESS": ray_address}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=env, preexec_fn=heed_interrupts, **pipes)


def manifest(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "manifest.jsonl").read_text().splitlines()]


def rows(out: Path, line: dict[str, Any]) -> int:
    with safe_open(out / line["part"], framework="pt") as part:
        return int(part.get_slice(line["id"]).get_shape()[0])


@pytest.mark.timeout(180)
def test_a_mixed_folder_is_encoded_in_order_and_its_broken_file_gets_an_error_line(
    save_picture: Callable[..., Path], tmp_path: Path
) -> None:
    save_picture("photos/a.jpg", 640, 480)
    save_picture("photos/b.png", 30, 700)
    (tmp_path / "photos/c.jpg").write_bytes((tmp_path / "photos/a.jpg").read_bytes()[:5000])
    (tmp_path / "photos/d.gif").write_text("no picture")
    save_picture("photos/e/f.webp", 100, 100)
    (tmp_path / "photos/readme.txt").touch()
    out = tmp_path / "out"
    process = start("encode", str(tmp_path / "photos"), "--out", str(out), "--config", "configs/tiny-cpu.yaml")
    stdout, stderr = process.communicate(timeout=150)
    assert process.returncode == 1, stderr
    assert "5 items in" in stdout
    assert "2 failed" in stdout
    assert "d.gif: the file is text" in stderr
    lines = manifest(out)
    assert [Path(line["source"]).name for line in lines] == ["a.jpg", "b.png", "c.jpg", "d.gif", "f.webp"]
    assert [line["status"] for line in lines] == ["ok", "ok", "error", "error", "ok"]
    assert {line["error"]["type"] for line in lines if line["status"] == "error"} == {"BadMediaError"}
    for line in lines:
        if line["status"] == "ok":
            assert rows(out, line) == line["num_tokens"] == 64 * len(line["grids"])
            assert line["graph"] or line["miss"]


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("number", "own_ray"), [(signal.SIGINT, False), (signal.SIGTERM, True)])
def test_an_interrupted_run_leaves_what_was_encoded(
    nodes: Cluster, save_picture: Callable[..., Path], tmp_path: Path, number: signal.Signals, own_ray: bool
) -> None:
    picture, out = str(save_picture("a.jpg", 640, 480)), tmp_path / "out"
    command = ["encode", *[picture] * 3000, "--out", str(out), "--workers", "1"]
    process = start(*command, ray_address=None if own_ray else nodes.address)
    until_s = time.monotonic() + 150
    assert process.stderr is not None
    for line in process.stderr:  # the first progress line: some items are done, most are not
        if "/3000 items" in line:
            break
        assert time.monotonic() < until_s
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr
    assert "received" not in stderr  # Ray's own answer to SIGTERM
    lines = manifest(out)
    assert 0 < len(lines) < 3000
    assert len({line["id"] for line in lines}) == len(lines)
    assert rows(out, lines[-1]) == lines[-1]["num_tokens"]
    assert sorted(path.name for path in out.iterdir()) == ["manifest.jsonl", "part-00000.safetensors"]


@pytest.mark.timeout(180)
def test_clips_and_pictures_go_through_one_pool(
    nodes: Cluster, save_picture: Callable[..., Path], tmp_path: Path
) -> None:
    """A clip longer than any graph, a picture, a clip without frames and half a clip."""
    save_picture("media/b.png", 200, 150)
    whole = make_clip(40, (320, 240), fps=2)
    (tmp_path / "media/a.mp4").write_bytes(whole)
    (tmp_path / "media/c.mp4").write_bytes(make_clip(0))
    (tmp_path / "media/d.mp4").write_bytes(whole[: len(whole) // 2])
    config = tmp_path / "pool.yaml"
    config.write_text(
        "num_workers: 1\n"
        "worker: {device: cpu, encoder: {model: tiny-qwen2.5-vl, token_budgets: [512], video: {max_frames: 16}}}\n"
    )
    out = tmp_path / "out"
    process = start(
        "encode", str(tmp_path / "media"), "--out", str(out), "--config", str(config), ray_address=nodes.address
    )
    _, stderr = process.communicate(timeout=150)
    assert process.returncode == 1, stderr
    clip, picture, *broken = manifest(out)
    assert clip["status"] == picture["status"] == "ok", stderr
    assert len(clip["grids"]) == 8
    assert clip["note"] == "video of 40 frames, 2 a second"
    assert rows(out, clip) == clip["num_tokens"] > 512
    assert rows(out, picture) == picture["num_tokens"] == 35
    assert [line["error"]["type"] for line in broken] == ["BadMediaError"] * 2
