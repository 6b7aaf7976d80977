"""`encpool serve` as a person runs it: a process of its own, with a Ray of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fakes import until
from http_calls import Caller

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(240)
def test_it_answers_while_it_starts_serves_and_ends_on_a_signal(pictures: list[bytes]) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "cluster.cli", "serve", "--config", "configs/serve-cpu.yaml", "--port", "0"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        assert process.stdout is not None
        listening = process.stderr.readline()
        assert "the pool is starting" in listening
        url = listening.split()[3].rstrip(",")
        with Caller(url) as caller:
            assert caller.get("/health").value == {"status": "starting"}
            reply = caller.msgpack(items=[pictures[0]])
            assert (reply.status, reply.headers["Retry-After"]) == (503, "1")
            assert "the pool is starting" in reply.error[1]
            assert process.stdout.readline() == f"serving tiny-minicpmv-2.6 on {url}\n"
            first, again = (caller.msgpack(items=[pictures[0]]) for _ in range(2))
            assert first.statuses == again.statuses == [200]
            assert [reply.items[0]["cached"] for reply in (first, again)] == [False, True]
            assert caller.get("/v1/stats").value["pool"]["cache"]["hits"] == 1
            until(
                lambda: not caller.get("/v1/stats").value["in_flight"]["requests"]
            )  # the answer is here before its end
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, stderr
    assert "draining: 0 requests under way" in stderr
    assert "Traceback" not in stderr
