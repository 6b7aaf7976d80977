"""`encpool demo`: drawn pictures of many shapes through two local workers, and a table of what came out."""

from __future__ import annotations

import json
import tempfile
from itertools import groupby
from pathlib import Path
from typing import Any

from cluster.config import parse_config
from cluster.files.directory import MANIFEST
from cluster.files.encode_files import encode_files
from cluster.files.sources import find_sources
from cluster.tables import aligned
from encoder.pictures import DEMO_SIZES, draw_picture

DEMO_CONFIG = {"num_workers": 2, "worker": {"device": "cpu", "encoder": {"model": "tiny-minicpmv-2.6"}}}

# As on disk anywhere: mostly JPEG. Fast settings, since nobody keeps the files.
_SAVE_AS: tuple[tuple[str, dict[str, Any]], ...] = (
    (".jpg", {"quality": 90}),
    (".png", {"compress_level": 1}),
    (".jpg", {"quality": 75}),
    (".webp", {"method": 0}),
)


def run_demo() -> int:
    """Draw, encode, show. Returns the number of pictures that failed."""
    folder = Path(tempfile.mkdtemp(prefix="encpool-demo-"))
    pictures, out = folder / "pictures", folder / "embeddings"
    draw_pictures(pictures)
    print(f"drew {len(DEMO_SIZES)} pictures; two CPU workers with a small random MiniCPM-V 2.6 encode them", flush=True)
    summary = encode_files(find_sources([str(pictures)]), out, parse_config(DEMO_CONFIG, source="demo"))
    lines = [json.loads(line) for line in (out / MANIFEST).read_text().splitlines()]
    print(f"\n{outcome_table(lines)}\n\n{summary}")
    print("grids: rows x columns of patches of each slice; ms: decoding and cutting + replaying, at the worker")
    print(f"pictures    {pictures}")
    print(f"embeddings  {out}/part-*.safetensors, listed in {out / MANIFEST}")
    return summary.num_failed


def draw_pictures(folder: Path) -> None:
    """One picture a demo size; the file's name says the size."""
    folder.mkdir(parents=True)
    for number, (width, height) in enumerate(DEMO_SIZES):
        suffix, options = _SAVE_AS[number % len(_SAVE_AS)]
        draw_picture(width, height, seed=number).save(folder / f"{number:02}-{width}x{height}{suffix}", **options)


def outcome_table(lines: list[dict[str, Any]]) -> str:
    """Manifest lines for people."""
    header = ("picture and size", "grids", "tokens", "graph or miss", "ms")
    return aligned(header, [_row(line) for line in lines], right=("tokens", "ms"))


def _row(line: dict[str, Any]) -> tuple[object, ...]:
    name = Path(line["source"]).name
    if line["status"] == "error":
        return name, "", "", f"{line['error']['type']}: {line['error']['message']}", ""
    timings = line["timings_ms"]
    way = " + ".join(
        [_without_encoder(graph) for graph in line.get("graph", "").split(" + ") if graph]
        + [f"eager: {reason}" for reason in line.get("miss", "").split(" + ") if reason]
    )
    ms = f"{timings.get('decode', 0.0):.0f} + {timings.get('replay', 0.0):.1f}"
    return name, _grids(line["grids"]), line["num_tokens"], way, ms


def _grids(grids: list[list[int]]) -> str:
    """Rows and columns of patches of each segment, equal neighbours counted."""
    parts = []
    for (_, rows, columns), same in groupby(grids):
        count = len(list(same))
        parts.append(f"{rows}x{columns}" if count == 1 else f"{count} of {rows}x{columns}")
    return ", ".join(parts)


def _without_encoder(graph: str) -> str:
    return graph.partition("/")[2] or graph
