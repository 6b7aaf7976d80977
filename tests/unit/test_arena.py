"""One block of bytes for all inputs of a run: fields keep apart, each where a GPU reads it fast."""

from __future__ import annotations

import numpy as np
import torch

from encoder.adapters.base import TensorSpec
from encoder.arena import ArenaLayout


def test_fields_begin_on_whole_lines_and_keep_apart() -> None:
    specs = {
        "ids": TensorSpec(shape=(3,), dtype="int32"),
        "weights": TensorSpec(shape=(65, 1), dtype="float32"),
        "pixels": TensorSpec(shape=(2, 7), dtype="uint8"),
    }
    layout = ArenaLayout.of(specs)
    assert layout.offsets == {"ids": 0, "weights": 256, "pixels": 768}
    assert layout.num_bytes == layout.used_bytes(2) == 768 + 14
    assert layout.used_bytes(1) == 768 + 7
    arrays = layout.arrays(torch.zeros(layout.num_bytes, dtype=torch.uint8))
    for number, array in enumerate(arrays.values(), start=1):
        array[:] = number
    assert [np.unique(array).tolist() for array in arrays.values()] == [[1], [2], [3]]
