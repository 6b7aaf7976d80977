"""`encpool up` and what follows, as a person types it, on a machine without a Ray cluster."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from subprocess import PIPE

import msgpack
import pytest
from http_calls import Caller

from cluster.gateway.wire import MSGPACK
from cluster.lifecycle.head import AUTH_VARIABLES, Head
from cluster.lifecycle.local_ray import NOTICE_DEATHS
from cluster.lifecycle.processes import born

ROOT = Path(__file__).parents[2]
ENCPOOL = (sys.executable, "-m", "cluster.cli")
Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """A state directory of its own, and no Ray cluster."""
    env = {key: value for key, value in os.environ.items() if key not in ("RAY_ADDRESS", *AUTH_VARIABLES)}
    return {**env, "ENCPOOL_STATE_DIR": str(tmp_path / "state")}


@pytest.fixture
def encpool(env: dict[str, str], tmp_path: Path) -> Iterator[Command]:
    """Runs a command; at the end no pool is left."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [*ENCPOOL, *arguments]
        return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=150)

    yield run
    if (tmp_path / "state/head.json").exists():
        run("down")


class Half:
    """A request whose body has come in part."""

    def __init__(self, caller: Caller, picture: bytes) -> None:
        self._body = msgpack.packb({"items": [picture]})
        self._socket = caller.socket()
        head = f"POST /v1/encode HTTP/1.1\r\nHost: x\r\nContent-Type: {MSGPACK}\r\nContent-Length: {len(self._body)}"
        self._socket.sendall(head.encode() + b"\r\nConnection: close\r\n\r\n" + self._body[:10])
        while not caller.get("/v1/stats").value["in_flight"]["requests"]:
            time.sleep(0.02)

    def finish(self) -> bytes:
        """Send the rest; the answer."""
        self._socket.sendall(self._body[10:])
        answer = b""
        while chunk := self._socket.recv(2**16):
            answer += chunk
        return answer

    def close(self) -> None:
        self._socket.close()


@contextmanager
def half_a_request(url: str, picture: bytes) -> Iterator[Half]:
    with Caller(url) as caller, closing(Half(caller, picture)) as half:
        yield half


@pytest.mark.timeout(400)
def test_a_pool_is_raised_looked_at_and_ended_and_its_head_with_it(
    encpool: Command, env: dict[str, str], tmp_path: Path, save_picture: Callable[..., Path]
) -> None:
    config = tmp_path / "pool.yaml"
    config.write_text(
        "num_workers: 1\nname: photos\nworker: {device: cpu, encoder: {model: tiny-minicpmv-2.6}}\ngateway: {port: 0}\n"
        "replan: {enabled: true}\n"
    )
    up = encpool("up", "--config", str(config), "--serve")
    assert up.returncode == 0, up.stderr
    assert "pool 'photos' is up with 1 workers" in up.stdout
    assert "no Ray cluster is named: starting one on this machine" in up.stderr
    head = Head(**json.loads((tmp_path / "state/head.json").read_text()))
    assert head.token_file is not None
    assert stat.S_IMODE(Path(head.token_file).stat().st_mode) == 0o600

    url = up.stdout.rpartition(" on ")[2].strip()
    over_http = encpool("encode", str(save_picture("photo.png")), "--out", str(tmp_path / "out"), "--url", url)
    assert over_http.returncode == 0, over_http.stderr
    assert "1 items in" in over_http.stdout

    noticing = environment_of("ray::GatewayActor", f"ENCPOOL_STATE_DIR={tmp_path / 'state'}").items()
    assert NOTICE_DEATHS.items() <= noticing  # it is a client of the pool, like a program that connects

    command = [*ENCPOOL, "serve", "--pool", "photos", "--port", "0"]
    foreground = subprocess.Popen(command, cwd=ROOT, env=env, stdout=PIPE, stderr=PIPE, text=True)
    assert foreground.stdout is not None
    assert foreground.stdout.readline().startswith("serving tiny-minicpmv-2.6 on http://127.0.0.1:")

    told = json.loads(encpool("status", "--json").stdout)
    assert (told["name"], told["num_ready"], told["workers"][0]["worker"]) == ("photos", 1, "worker-0")
    assert [(one["note"], one["num_changes"]) for one in told["replanning"]] == [("not looked at yet", 0)]
    config.write_text(
        "groups:\n  - {name: a, num_workers: 399, worker: {encoder: {model: tiny-minicpmv-2.6}}}\n"
        "  - {name: b, num_workers: 1, worker: {encoder: {model: tiny-siglip}}}\nworker: {device: cpu}\n"
    )
    more = encpool("up", "--config", str(config), "--name", "more")
    assert more.returncode == 1
    assert "starting 400 workers with tiny-minicpmv-2.6, tiny-siglip ..." in more.stderr
    assert "400 workers need 400 CPUs, the cluster has" in more.stderr

    with half_a_request(url, save_picture("late.png").read_bytes()) as request, ThreadPoolExecutor(1) as thread:
        ending = thread.submit(encpool, "down")
        with Caller(url) as other:
            while other.get("/health").value != {"status": "draining"}:
                assert not ending.done(), ending.result()
                time.sleep(0.02)
            refused = other.msgpack(items=[b"x"])
            assert (refused.status, refused.headers["Retry-After"]) == (503, "1")
        assert b"HTTP/1.1 200" in request.finish(), "what was under way is answered"
        down = ending.result()
    assert down.returncode == 0, down.stderr
    assert "draining gateway-0: 1 requests under way, 30 s at most" in down.stderr
    assert "in time" not in down.stderr
    assert f"and the Ray head at {head.address} with it" in down.stdout
    assert born(head.pid) is None
    assert not Path(head.temp_dir).exists()
    _, said = foreground.communicate(timeout=30)
    assert foreground.returncode == 1, said
    assert "encpool: error: pool 'photos' was ended" in said
    after = encpool("status")
    assert after.returncode == 1
    assert "no Ray cluster is named, and none was started by `encpool up`" in after.stderr


def environment_of(title: str, entry: str) -> dict[str, str]:
    """What the one process with this title, and this entry in its environment, was started with."""
    found = []
    for process in Path("/proc").iterdir():
        with suppress(OSError):
            if process.name.isdecimal() and (process / "cmdline").read_bytes().startswith(title.encode()):
                entries = (process / "environ").read_text().split("\0")
                found += [entries] if entry in entries else []
    (entries,) = found
    return dict(one.split("=", 1) for one in entries if "=" in one)
