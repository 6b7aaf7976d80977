"""The record of the Ray head that `encpool up` starts: found while it runs, forgotten when it does not."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from cluster.lifecycle.head import Head, running_head, start_head, state_dir, stop_head
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
