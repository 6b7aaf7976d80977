"""The Ray head that `encpool up` starts on a machine without a cluster, and its record in the user's state directory.

One head a user: later commands, in other terminals, find it by the record, and so does `EncoderPool.connect`. It
authenticates by a token that only the user can read. `encpool down` of the last pool ends it.

In that directory `head.json` names the head, `starting.json` one that does not listen yet. Who starts one holds
`head.lock`; so who gets the lock and finds a `starting.json` knows that nobody waits for that head any more. Who raises
a pool shares `raising.lock`: a head without pools may be ended only while nobody does.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path

from cluster.lifecycle.locks import locked
from cluster.lifecycle.processes import born
from encoder.errors import WorkerStartError

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 45.0  # Ray drains its node for up to 30 s
POLL_S = 0.1
AUTH_VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """A running head that we started."""

    address: str
    pid: int  # of the process that holds all others; they end with it
    born: str  # when that process started, as the kernel counts: pids are used again
    temp_dir: str
    token_file: str | None  # None: the environment says how to authenticate

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to reach it."""
        return {} if self.token_file is None else {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": self.token_file}


def state_dir() -> Path:
    """Where the record lies: ENCPOOL_STATE_DIR, or `encpool` among the user's states."""
    named = os.environ.get("ENCPOOL_STATE_DIR")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "encpool"


def running_head() -> Head | None:
    """The head of this user on this machine, if it still runs."""
    return _recorded("head.json")


def raising_pool() -> AbstractContextManager[bool]:
    """While a pool is being raised the head stays, also without pools."""
    return locked(state_dir() / "raising.lock", shared=True)


def stop_unused(head: Head) -> bool:
    """End a head that has no pools, unless somebody is raising one; whether it was ended."""
    with locked(state_dir() / "raising.lock", wait=False) as alone:
        if alone:
            stop_head(head)
        return alone


def stop_abandoned() -> bool:
    """End a head whose starter died before it listened; whether there was one. Waits for a starter that lives."""
    if not (state_dir() / "starting.json").exists():
        return False
    with locked(state_dir() / "head.lock"):
        return _stop_abandoned()


def _stop_abandoned() -> bool:
    abandoned = _recorded("starting.json")
    if abandoned is not None:
        stop_head(abandoned)
    return abandoned is not None


def _recorded(name: str) -> Head | None:
    record = state_dir() / name
    try:
        head = Head(**json.loads(record.read_text()))
    except (OSError, ValueError, TypeError):
        return None
    if born(head.pid) != head.born:
        record.unlink(missing_ok=True)
        return None
    return head


def start_head(num_cpus: int, *, say: Callable[[str], None] = lambda text: None) -> Head | None:
    """Start a head and wait until it listens; None where one runs, also one that another command started meanwhile.

    Raises WorkerStartError with the end of its log.
    """
    with locked(state_dir() / "head.lock", wait=False) as alone:
        if alone:
            return _start_head(num_cpus, say)
    say("another command is starting a Ray cluster on this machine: waiting for it")
    with locked(state_dir() / "head.lock"):
        return _start_head(num_cpus, say)


def _start_head(num_cpus: int, say: Callable[[str], None]) -> Head | None:
    if running_head() is not None:
        return None
    if _stop_abandoned():
        say("ended a Ray cluster whose start was cut off")
    directory = state_dir()
    token_file = None if any(map(os.environ.get, AUTH_VARIABLES)) else str(_write_token(directory))
    base = tempfile.gettempdir()
    # Of its own: Ray's `auto` looks into the usual one. Short: paths of sockets end at 107 bytes, Ray adds some 70.
    temp_dir = tempfile.mkdtemp(prefix="encpool-ray-", dir=base if len(base) < 20 else "/tmp")
    port = _free_port()
    say(f"no Ray cluster is named: starting one on this machine, at 127.0.0.1:{port}")
    log = directory / "head.log"
    auth = {} if token_file is None else {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": token_file}
    command = [
        sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats",
        f"--port={port}", f"--num-cpus={num_cpus}", "--include-dashboard=false", f"--temp-dir={temp_dir}",
    ]  # fmt: skip
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=_environment(auth),
            cwd="/",
            start_new_session=True,  # Ctrl-C in our terminal is not for it
        )
    address = f"127.0.0.1:{port}"
    head = Head(
        address=address, pid=process.pid, born=born(process.pid) or "", temp_dir=temp_dir, token_file=token_file
    )
    try:
        _write_record(directory / "starting.json", head)
        until_s = time.monotonic() + START_TIMEOUT_S
        while not _blocks(log):
            if process.poll() is not None or time.monotonic() > until_s:
                lines = log.read_text(errors="replace").split("\n")
                said = next((line.strip() for line in reversed(lines) if line.strip()), "it says nothing")
                raise WorkerStartError(f"no Ray head could be started here: {said}; its log is {log}")
            time.sleep(POLL_S)
        os.replace(directory / "starting.json", directory / "head.json")
    except BaseException:
        stop_head(head)
        raise
    return head


def stop_head(head: Head) -> None:
    """End it and everything on it. Raises WorkerStartError when it does not end."""
    for number, timeout_s in ((signal.SIGTERM, STOP_TIMEOUT_S), (signal.SIGKILL, 5.0)):
        if born(head.pid) == head.born:
            os.kill(head.pid, number)
        if _wait_gone(head, timeout_s):
            break
    else:
        raise WorkerStartError(f"the Ray head of process {head.pid} does not end; kill it by hand")
    for name in ("starting.json", "head.json"):
        if _names(state_dir() / name, head):
            (state_dir() / name).unlink(missing_ok=True)
    shutil.rmtree(head.temp_dir, ignore_errors=True)


def _write_record(path: Path, head: Head) -> None:
    """Whole or not at all: others may read it meanwhile."""
    unnamed = path.with_suffix(".tmp")
    unnamed.write_text(json.dumps(asdict(head)))
    os.replace(unnamed, path)


def _names(record: Path, head: Head) -> bool:
    try:
        return bool(json.loads(record.read_text()) == asdict(head))
    except (OSError, ValueError):
        return False


def _wait_gone(head: Head, timeout_s: float) -> bool:
    until_s = time.monotonic() + timeout_s
    while born(head.pid) == head.born:
        if time.monotonic() > until_s:
            return False
        time.sleep(POLL_S)
    return True


def _blocks(log: Path) -> bool:
    """Whether the head says that it is up and waits."""
    return "block forever" in log.read_text(errors="replace")


def _environment(auth: Mapping[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return {**kept, **auth}


def _write_token(directory: Path) -> Path:
    path = directory / "token"
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    return path


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
