"""The record of the Ray head that `encpool up` starts: found while it runs, forgotten when it does not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from queue import Queue

import pytest

from cluster.lifecycle.head import (
    AUTH_VARIABLES,
    Head,
    raising_pool,
    running_head,
    start_head,
    state_dir,
    stop_abandoned,
    stop_head,
    stop_unused,
)
from cluster.lifecycle.locks import locked
from cluster.lifecycle.processes import born
from encoder.errors import WorkerStartError


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ENCPOOL_STATE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def head_of(process: subprocess.Popen[bytes], temp_dir: Path) -> Head:
    head = Head(
        address="127.0.0.1:1", pid=process.pid, born=born(process.pid) or "", temp_dir=str(temp_dir), token_file=None
    )
    (state_dir() / "head.json").write_text(json.dumps(asdict(head)))
    return head


def test_a_running_head_is_found_and_ended(process: subprocess.Popen[bytes], tmp_path: Path) -> None:
    temp_dir = tmp_path / "ray"
    temp_dir.mkdir()
    head = head_of(process, temp_dir)
    assert running_head() == head
    stop_head(head)
    assert process.wait(10) == -signal.SIGTERM
    assert running_head() is None
    assert not temp_dir.exists()


def test_a_head_that_is_gone_is_forgotten_though_another_process_has_its_number(
    process: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    head = replace(head_of(process, tmp_path), born="1")
    (tmp_path / "head.json").write_text(json.dumps(asdict(head)))
    assert running_head() is None
    assert not (tmp_path / "head.json").exists()
    stop_head(head)
    assert process.poll() is None  # not ours to kill


@pytest.mark.parametrize("text", ["", "{}", "no json", '{"pid": 1}'])
def test_a_record_that_makes_no_sense_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "head.json").write_text(text)
    assert running_head() is None


def test_a_head_that_cannot_start_says_why_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")  # as a user may have said, without having a token
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    with pytest.raises(
        WorkerStartError, match=r"no Ray head could be started here: .*[Tt]oken.*; its log is .*head.log"
    ):
        start_head(1)
    assert not (tmp_path / "head.json").exists()
    assert not (tmp_path / "token").exists()  # the environment says how to authenticate


def test_a_head_is_not_ended_while_somebody_raises_a_pool(process: subprocess.Popen[bytes], tmp_path: Path) -> None:
    head = head_of(process, tmp_path / "ray")
    with raising_pool(), raising_pool():
        assert not stop_unused(head)
    assert running_head() == head
    assert stop_unused(head)
    assert running_head() is None


def test_who_comes_while_a_head_is_being_started_waits_for_it_and_starts_none(
    process: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    said: Queue[str] = Queue()
    with ThreadPoolExecutor(1) as threads:
        with locked(tmp_path / "head.lock"):
            second = threads.submit(start_head, 1, say=said.put)
            assert "waiting for it" in said.get(timeout=10)
            assert not second.done()
            head = head_of(process, tmp_path / "ray")
        assert second.result(10) is None
    assert running_head() == head
    assert not (tmp_path / "token").exists()


def test_sigterm_ends_the_head_that_up_was_starting_and_down_ends_one_whose_up_was_killed(tmp_path: Path) -> None:
    config = tmp_path / "pool.yaml"
    config.write_text("num_workers: 1\nworker: {device: cpu, encoder: {model: tiny-minicpmv-2.6}}\n")
    env = {key: value for key, value in os.environ.items() if key not in ("RAY_ADDRESS", *AUTH_VARIABLES)}
    command = [sys.executable, "-m", "cluster.cli", "up", "--config", str(config)]
    starting = tmp_path / "starting.json"
    for number, status in ((signal.SIGTERM, 130), (signal.SIGKILL, -signal.SIGKILL)):
        with subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL) as up:
            until_s = time.monotonic() + 60
            while not starting.exists() and time.monotonic() < until_s:
                time.sleep(0.01)
            head = Head(**json.loads(starting.read_text()))
            up.send_signal(number)
            assert up.wait(60) == status
        if number == signal.SIGKILL:
            assert born(head.pid) == head.born
            assert stop_abandoned()
        assert born(head.pid) is None
        assert not starting.exists()
        assert not Path(head.temp_dir).exists()
