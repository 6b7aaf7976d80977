"""Models by their hub id: the hub's own client fetches them from a small hub on this machine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from encoder.adapters.registry import resolve_model
from encoder.checkpoints import init_checkpoint
from encoder.config import EncoderConfig
from encoder.errors import ConfigError
from encoder.runner import EncoderRunner
from encoder.snapshots import INDEX, SINGLE
from encoder.weights import random_tensors

COMMIT = "0123456789" * 4
PRESET = "tiny-siglip"


class Hub(BaseHTTPRequestHandler):
    """One repository of files; as much of the hub's interface as its client needs to fetch some of them."""

    def __init__(self, files: Path, fetched: list[str], *connection: object) -> None:
        self._files, self._fetched = files, fetched
        super().__init__(*connection)  # type: ignore[arg-type]

    def do_HEAD(self) -> None:
        self.do_GET(head=True)

    def do_GET(self, *, head: bool = False) -> None:
        if self.path.startswith("/api/models/"):
            files = [
                {
                    "type": "file",
                    "path": path.name,
                    "rfilename": path.name,
                    "size": path.stat().st_size,
                    "oid": path.name,
                }
                for path in self._files.iterdir()
            ]
            listed = files if "/tree/" in self.path else {"id": "me/it", "sha": COMMIT, "siblings": files}
            self._answer(200, json.dumps(listed).encode())
            return
        file = self._files / self.path.split("/")[-1]
        if not file.is_file():
            self._answer(404, b"", **{"X-Error-Code": "EntryNotFound"})
            return
        if not head:
            self._fetched.append(file.name)
        self._answer(200, file.read_bytes(), head=head)

    def _answer(self, status: int, body: bytes, *, head: bool = False, **headers: str) -> None:
        self.send_response(status)
        etag = hashlib.sha256(body).hexdigest()
        for name, value in {
            "X-Repo-Commit": COMMIT,
            "ETag": f'"{etag}"',
            "Content-Length": len(body),
            **headers,
        }.items():
            self.send_header(name, str(value))
        self.end_headers()
        if not head:
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def released(tmp_path: Path) -> Path:
    """A checkpoint as it lies on the hub."""
    init_checkpoint(PRESET, tmp_path / "released", seed=3)
    return tmp_path / "released"


@pytest.fixture
def fetched(released: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the files that the client took from the hub so far."""
    names: list[str] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Hub, released, names))
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    yield names
    server.shutdown()
    server.server_close()


def test_a_checkpoint_of_one_file_is_fetched_though_it_has_no_index(released: Path, fetched: list[str]) -> None:
    (shard,) = released.glob("*.safetensors")
    shard.rename(released / SINGLE)
    (released / INDEX).unlink()
    runner = EncoderRunner.from_config(EncoderConfig(model="me/it", graphs=False), "cpu")
    assert (runner.adapter.encoder, set(fetched)) == ("it", {"config.json", SINGLE})
    fetched.clear()
    assert resolve_model("me/it").snapshot is not None
    assert not fetched, "it is kept"


def test_only_the_shards_of_the_vision_part_are_fetched(released: Path, fetched: list[str]) -> None:
    save_file({"text_model.weight": torch.zeros(2, 2)}, released / "text.safetensors")
    (released / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.1, 0.2, 0.3]}))
    index = json.loads((released / INDEX).read_text())
    index["weight_map"]["text_model.weight"] = "text.safetensors"
    (released / INDEX).write_text(json.dumps(index))
    model = resolve_model("me/it")
    assert model.snapshot is not None
    assert model.config["preprocessor_config"]["image_mean"] == [0.1, 0.2, 0.3]
    assert "text.safetensors" not in fetched
    (shard,) = model.snapshot.glob("*.safetensors")
    assert load_file(shard).keys() == random_tensors(model.adapter(EncoderConfig(model="it")).weight_shapes(), 3).keys()


def test_what_cannot_be_fetched_is_a_config_error(released: Path, fetched: list[str]) -> None:
    (released / "config.json").write_text(json.dumps({"model_type": "whisper"}))
    with pytest.raises(ConfigError, match="me/it: model_type 'whisper' has no adapter"):
        resolve_model("me/it")
    (released / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"no readable config\.json"):
        resolve_model("me/other")
