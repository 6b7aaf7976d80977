import errno
import json
import resource
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from safetensors import safe_open

import cluster.files.output
from cluster.files.directory import check_directory
from cluster.files.output import OutputWriter
from cluster.files.sources import Source
from cluster.streams.outcomes import Embedding, Outcome
from encoder.errors import BadMediaError, ConfigError
from encoder.types import ItemShape


def source(name: str) -> Source:
    return Source(id=name, path=f"photos/{name}.jpg")


def encoded(rows: int = 4, dtype: torch.dtype = torch.float32, **fields: Any) -> Outcome:
    tokens = torch.arange(rows * 8).reshape(rows, 8).to(dtype)
    shape = ItemShape(grids=((1, 2, 3),), num_patches=6, num_tokens=rows)
    parts: dict[str, Any] = {"graphs": ("g",), "misses": (), "note": None} | fields
    embedding = Embedding(tokens=tokens, shape=shape, timings={"decode": 1.23456}, worker="w", **parts)
    return Outcome(source="", embedding=embedding, error=None)


def failed(message: str = "no") -> Outcome:
    return Outcome(source="", embedding=None, error=BadMediaError(message))


def lines(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "manifest.jsonl").read_text().splitlines()]


def tensors(directory: Path, part: str) -> dict[str, torch.Tensor]:
    with safe_open(directory / part, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)


def writer(directory: Path, **options: Any) -> OutputWriter:
    return OutputWriter(directory, metadata={"model": "tiny"}, **options)


def files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_parts_are_safetensors_and_the_manifest_says_where_each_item_is(tmp_path: Path, dtype: torch.dtype) -> None:
    outcomes = [encoded(4, dtype), failed("broken"), encoded(2, dtype, graphs=(), misses=("too_large",), note="n")]
    with writer(tmp_path) as output:
        for number, outcome in enumerate(outcomes):
            output.write(source(f"i{number}"), outcome)
    first, second, third = lines(tmp_path)
    assert first == {
        "id": "i0",
        "source": "photos/i0.jpg",
        "status": "ok",
        "num_tokens": 4,
        "num_patches": 6,
        "grids": [[1, 2, 3]],
        "graph": "g",
        "timings_ms": {"decode": 1.235},
        "part": "part-00000.safetensors",
    }
    assert second["error"] == {"type": "BadMediaError", "message": "broken"}
    assert (third["miss"], third["note"], "graph" in third) == ("too_large", "n", False)
    found = tensors(tmp_path, "part-00000.safetensors")
    assert found.keys() == {"i0", "i2"}
    for name, outcome in (("i0", outcomes[0]), ("i2", outcomes[2])):
        assert outcome.embedding is not None
        assert found[name].dtype == dtype
        assert torch.equal(found[name], outcome.embedding.tokens)
    with safe_open(tmp_path / "part-00000.safetensors", framework="pt") as file:
        assert file.metadata() == {"model": "tiny", "dtype": str(dtype).removeprefix("torch.")}


def test_parts_are_rolled_at_their_limit_and_an_item_beyond_it_gets_its_own(tmp_path: Path) -> None:
    with writer(tmp_path, max_part_bytes=300) as output:
        for number, rows in enumerate((4, 4, 4, 20, 1)):  # 32 bytes a row
            output.write(source(f"i{number}"), encoded(rows))
    assert [line["part"][5:10] for line in lines(tmp_path)] == ["00000", "00000", "00001", "00002", "00003"]
    for line in lines(tmp_path):
        assert tensors(tmp_path, line["part"])[line["id"]].shape == (line["num_tokens"], 8)


def test_at_any_moment_the_manifest_names_only_what_is_there(tmp_path: Path) -> None:
    with writer(tmp_path, max_part_bytes=300) as output:
        for number in range(7):
            output.write(source(f"i{number}"), encoded(4) if number % 3 else failed())
            for line in lines(tmp_path):
                assert line["status"] == "error" or line["id"] in tensors(tmp_path, line["part"])
    assert [line["id"] for line in lines(tmp_path)] == [f"i{number}" for number in range(7)]


def test_an_interrupt_keeps_what_came_before(tmp_path: Path) -> None:
    output = writer(tmp_path)
    output.write(source("i0"), encoded())
    output.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert lines(tmp_path)[0]["id"] == "i0"
    assert tensors(tmp_path, "part-00000.safetensors").keys() == {"i0"}
    assert files(tmp_path) == ["manifest.jsonl", "part-00000.safetensors"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a file just opened, closed by nobody
def test_an_interrupt_at_any_line_leaves_what_can_be_read(tmp_path: Path) -> None:
    outcomes = [encoded(4), failed(), encoded(5), encoded(3), failed(), encoded(20)]
    num_lines = 0
    while True:
        out = tmp_path / str(num_lines)
        out.mkdir()
        output = writer(out, max_part_bytes=300)
        if not interrupted_after(num_lines, output, outcomes):
            break
        ids = [line["id"] for line in lines(out)]
        assert ids in ([f"i{number}" for number in range(count)] for count in range(len(outcomes) + 1))
        parts = {name: tensors(out, name) for name in files(out) if name != "manifest.jsonl"}
        for line in lines(out):
            if line["status"] == "ok":
                assert parts[line["part"]][line["id"]].shape == (line["num_tokens"], 8)
        num_lines += 1
    assert num_lines > 100
    assert [line["id"] for line in lines(out)] == [f"i{number}" for number in range(len(outcomes))]


def interrupted_after(num_lines: int, output: OutputWriter, outcomes: list[Outcome]) -> bool:
    """Write the outcomes, with a KeyboardInterrupt after so many lines of the writer's; False when it had fewer."""

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal num_lines
        if frame.f_code.co_filename != cluster.files.output.__file__:
            return None
        if event == "line":
            num_lines -= 1
            if num_lines < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    with output:
        try:
            sys.settrace(trace)
            for number, outcome in enumerate(outcomes):
                output.write(source(f"i{number}"), outcome)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
    return num_lines < 0


def test_a_full_disk_is_named_and_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("cluster.files.output.shutil.copyfileobj", full)
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}'"), writer(tmp_path) as output:
        output.write(source("i0"), encoded())
    assert files(tmp_path) == ["manifest.jsonl"], "half a part is left on the disk that has no room"
    assert lines(tmp_path) == []


def test_a_full_disk_is_named_where_only_the_manifest_is_written(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def run_out_of_room() -> None:
        with writer(tmp_path) as output:
            output.write(source("i0"), failed())
            resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "manifest.jsonl").stat().st_size, before[1]))
            output.write(source("i1"), failed())

    try:
        with pytest.raises(OSError, match=f"File too large: '{tmp_path}'"):
            run_out_of_room()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [line["id"] for line in lines(tmp_path)] == ["i0"]


def test_a_run_without_a_result_leaves_a_manifest_alone(tmp_path: Path) -> None:
    with writer(tmp_path) as output:
        output.write(source("i0"), failed())
    assert files(tmp_path) == ["manifest.jsonl"]


def test_an_earlier_runs_output_is_kept_unless_told_otherwise(tmp_path: Path) -> None:
    check_directory(tmp_path)
    (tmp_path / "mine.txt").touch()
    with writer(tmp_path, max_part_bytes=1) as output:
        for number in range(3):
            output.write(source(f"i{number}"), encoded())
    with pytest.raises(ConfigError, match=r"manifest\.jsonl of an earlier run.*--overwrite"):
        check_directory(tmp_path)
    check_directory(tmp_path, overwrite=True)
    assert len(files(tmp_path)) == 5  # untouched until there is something to write
    with writer(tmp_path) as output:
        output.write(source("new"), encoded())
    assert files(tmp_path) == ["manifest.jsonl", "mine.txt", "part-00000.safetensors"]
    assert [line["id"] for line in lines(tmp_path)] == ["new"]


def test_a_file_cannot_be_the_output_directory(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    with pytest.raises(ConfigError, match="cannot write to"):
        check_directory(tmp_path / "out" / "deeper")
    with pytest.raises(ConfigError, match="cannot write to"):
        check_directory(tmp_path / "out")
