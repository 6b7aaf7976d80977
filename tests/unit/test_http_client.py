"""The client of the gateway where there is no gateway."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from cluster.cli import main
from cluster.http_client import HttpClient
from encoder.errors import ConfigError, PoolError


@pytest.fixture
def nobody() -> str:
    """An address where nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def test_where_nobody_ever_listened_the_client_gives_up_within_seconds(nobody: str) -> None:
    started_s = time.monotonic()
    with HttpClient(f"http://{nobody}") as client, pytest.raises(PoolError, match=r"Connection refused$"):
        client.encode(b"x")
    assert time.monotonic() - started_s < 10


def test_a_url_without_a_scheme_is_wrong_usage_and_the_right_one_is_said(
    nobody: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="write http://gpu:8080"):
        HttpClient("gpu:8080")
    assert main(["encode", str(tmp_path), "--out", str(tmp_path / "out"), "--url", nobody]) == 2
    assert f"write http://{nobody}" in capsys.readouterr().err
    assert main(["encode", str(tmp_path), "--out", str(tmp_path / "out"), "--url", f"http://{nobody}"]) == 1
    assert "ssl:default" not in capsys.readouterr().err
