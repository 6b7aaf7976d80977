"""Trace files: written in bufferfuls, read back, cut off, and told from other files."""

from __future__ import annotations

import resource
from pathlib import Path

import msgpack
import pytest
from fakes import Clock

from cluster.planning.traces import HEADER, TraceRecord, TraceWriter, read_trace
from encoder.errors import ConfigError


def record(number: int = 0, **changes: object) -> TraceRecord:
    fields = {
        "time_s": 1.7e9 + number,
        "model": "tiny@float32",
        "grids": ((1, 32, 32), (1, 24, 43)),
        "graphs": ("tiny@float32/image[packed]/192",),
        "misses": (),
        "ms": 12.5,
    }
    return TraceRecord(**{**fields, **changes})  # type: ignore[arg-type]


def written(path: Path, *records: TraceRecord) -> Path:
    with TraceWriter(path) as writer:
        for one in records:
            writer.write(one)
    return path


def test_what_is_written_is_read(tmp_path: Path) -> None:
    records = [record(0), record(1, graphs=(), misses=("too_large",)), record(2, grids=())]
    assert list(read_trace(written(tmp_path / "trace", *records))) == records


def test_writers_go_on_with_a_trace_and_share_it(tmp_path: Path) -> None:
    path = written(tmp_path / "trace", record(0))
    with TraceWriter(path) as one, TraceWriter(path) as other:
        one.write(record(1))
        other.write(record(2))
    assert sorted(item.time_s for item in read_trace(path)) == [1.7e9, 1.7e9 + 1, 1.7e9 + 2]
    (tmp_path / "raced").write_bytes(HEADER + path.read_bytes())  # both found the file new
    assert len(list(read_trace(tmp_path / "raced"))) == 3


def test_records_wait_for_a_bufferful_or_a_while(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "trace"
    with TraceWriter(path, buffer_bytes=200, flush_s=5.0, now_s=clock) as writer:
        writer.write(record(0))
        assert list(read_trace(path)) == []
        writer.write(record(1))
        writer.write(record(2))
        assert len(list(read_trace(path))) == 3
        writer.write(record(3))
        clock.now += 5
        writer.write(record(4))
        assert len(list(read_trace(path))) == 5


def test_a_full_disk_ends_a_trace_behind_a_whole_record(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """So that whoever writes to it next damages nothing. Some of a bufferful fits, as on a disk that fills up."""
    path = written(tmp_path / "trace", *map(record, range(10)))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 333, before[1]))
    try:
        written(path, *map(record, range(10, 20)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "the trace ends here: File too large" in caplog.text
    num_fitting = len(list(read_trace(path)))
    assert 10 < num_fitting < 20
    written(path, *map(record, range(20, 30)))
    assert [one.time_s - 1.7e9 for one in read_trace(path)] == [*range(num_fitting), *range(20, 30)]


def test_a_record_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    path = written(tmp_path / "trace", record(0), record(1))
    whole = path.read_bytes()
    for length in range(len(HEADER), len(whole)):
        path.write_bytes(whole[:length])
        assert [item.time_s for item in read_trace(path)] in ([], [1.7e9])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"\x89PNG\r\n\x1a\n" * 20, "is no trace"),
        (b"num_workers: 2\nworker: {}\n", "is no trace"),
        (msgpack.packb({"encpool_trace": 2}), "is a trace of version 2"),
        (HEADER[:5], "is no trace"),
        (HEADER + b"\xc1" * 9, "damaged at record 0"),
        (HEADER + msgpack.packb("hello"), "damaged at record 1"),
        (HEADER + msgpack.packb([0.0, "m", [[1, -3, 4]], [], [], 1.0]), "damaged at record 1"),
    ],
)
def test_other_files_are_config_errors(content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        list(read_trace(path))


def test_a_missing_file_and_a_foreign_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        list(read_trace(tmp_path / "none"))
    with pytest.raises(ConfigError, match="cannot write"):
        TraceWriter(tmp_path / "none" / "trace")
    (tmp_path / "photo.png").write_bytes(b"\x89PNG")
    with pytest.raises(ConfigError, match="is no trace"):
        TraceWriter(tmp_path / "photo.png")
    assert (tmp_path / "photo.png").read_bytes() == b"\x89PNG"
