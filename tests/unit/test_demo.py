from cluster.files.demo import outcome_table
from cluster.tables import aligned

ENCODED = {
    "source": "/tmp/pictures/02-1000x333.webp",
    "status": "ok",
    "num_tokens": 256,
    "grids": [[1, 18, 55], [1, 32, 32], [1, 32, 32]],
    "graph": "tiny@float32/image[packed]/192",
    "miss": "too_large",
    "timings_ms": {"decode": 12.34, "wait": 5.0, "replay": 6.78},
}
BROKEN = {"source": "b.jpg", "status": "error", "error": {"type": "BadMediaError", "message": "it is damaged"}}


def test_the_table_tells_sizes_tokens_and_how_it_was_encoded() -> None:
    assert outcome_table([ENCODED, BROKEN]).splitlines() == [
        "picture and size  grids              tokens  graph or miss                               ms",
        "02-1000x333.webp  18x55, 2 of 32x32     256  image[packed]/192 + eager: too_large  12 + 6.8",
        "b.jpg                                        BadMediaError: it is damaged",
    ]


def test_columns_are_aligned() -> None:
    assert aligned(("a", "n"), [("xy", 1), ("z", 100)], right=("n",)).splitlines() == ["a     n", "xy    1", "z   100"]
