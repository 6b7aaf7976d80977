"""Fixtures for every test, and the skip of GPU tests where there is no GPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: spinning threads slow down what runs beside them

import pytest
from hypothesis import settings

from encoder.pictures import draw_picture

# No deadline: a busy machine is no failure. The same examples every time where a change is judged.
settings.register_profile("encpool", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("encpool")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    """torch draws the same numbers in a test, whatever ran before it."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture
def save_picture(tmp_path: Path) -> Callable[..., Path]:
    """Draw a picture into the test's folder: `save_picture("a/photo.jpg", width, height)`."""

    def save(name: str, width: int = 64, height: int = 48, seed: int = 0) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        draw_picture(width, height, seed).save(path)
        return path

    return save
