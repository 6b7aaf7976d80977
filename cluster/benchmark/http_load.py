"""Load on a gateway, from a process of its own: `python -m cluster.benchmark.http_load URL FILE CONNECTIONS REQUESTS`.

Prints one line of JSON: seconds of the whole, milliseconds of each request, how many were answered with each status.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections import Counter
from io import BytesIO
from pathlib import Path
from typing import Any

import aiohttp

from cluster.gateway.requests import write_request
from cluster.gateway.wire import MSGPACK, EncodeOptions, RequestItem
from encoder.errors import WorkerStartError

TIMEOUT_S = 1800.0


def run_load(url: str, file: Path, *, connections: int, requests: int) -> dict[str, Any]:
    """Start the process and wait for what it measured. Raises WorkerStartError when it failed."""
    command = [sys.executable, "-m", "cluster.benchmark.http_load", url, str(file), str(connections), str(requests)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    if done.returncode:
        raise WorkerStartError(f"the load on {url} failed: {done.stderr.strip().splitlines()[-1:]}")
    report: dict[str, Any] = json.loads(done.stdout)
    return report


async def load(url: str, body: bytes, connections: int, requests: int) -> dict[str, Any]:
    """So many requests of one body, over so many connections at once."""
    taken_ms: list[float] = []
    statuses: Counter[int] = Counter()
    left = requests

    async def ask(session: aiohttp.ClientSession) -> None:
        nonlocal left
        while left > 0:
            left -= 1
            started_s = time.perf_counter()
            async with session.post(
                f"{url}/v1/encode", data=BytesIO(body), headers={"Content-Type": MSGPACK}
            ) as answer:
                await answer.read()
            taken_ms.append((time.perf_counter() - started_s) * 1e3)
            statuses[answer.status] += 1

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), read_bufsize=2**20) as session:
        await ask_once(session, url)  # a connection is there, as with a client that lives
        started_s = time.perf_counter()
        await asyncio.gather(*(ask(session) for _ in range(connections)))
        elapsed_s = time.perf_counter() - started_s
    return {"elapsed_s": elapsed_s, "taken_ms": taken_ms, "statuses": statuses}


async def ask_once(session: aiohttp.ClientSession, url: str) -> None:
    """Open a connection."""
    async with session.get(f"{url}/health") as answer:
        await answer.read()


if __name__ == "__main__":
    picture = Path(sys.argv[2]).read_bytes()
    request = write_request([RequestItem(data=picture)], EncodeOptions())
    print(json.dumps(asyncio.run(load(sys.argv[1], request, int(sys.argv[3]), int(sys.argv[4])))))
