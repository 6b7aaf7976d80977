"""A client process of its own: encodes the pictures named in a file, again and again, until it is killed or done.

    python chaos_client.py RAY_ADDRESS POOL CONFIG_JSON PICTURES_FILE ROUNDS

Prints "begun" when the first outcome is there, then one line of JSON a picture.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import ray

from cluster.client import Client
from cluster.config import PoolConfig
from cluster.lifecycle.actors import ROUTER, WorkerHandles, find_actor
from cluster.streams.transport import RayTransport
from encoder.adapters.registry import load_adapter


def main(address: str, pool: str, config_json: str, pictures_file: str, rounds: str) -> None:
    ray.init(address=address, namespace="encpool", logging_level=40)
    config = PoolConfig.model_validate_json(config_json)
    transport = RayTransport(find_actor(pool, ROUTER), WorkerHandles(pool), timeout_s=20)
    client = Client(
        config, load_adapter(config.worker.encoder), transport, num_workers=lambda: max(1, config.num_workers)
    )
    pictures = Path(pictures_file).read_text().split("\n") * int(rounds)
    for number, outcome in enumerate(client.encode_many(pictures)):
        if not number:
            print("begun", flush=True)
        num_tokens = 0 if outcome.embedding is None else len(outcome.embedding.tokens)
        print(json.dumps({"source": str(outcome.source), "num_tokens": num_tokens}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
