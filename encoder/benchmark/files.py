"""Where a bench's figures go besides the terminal: a JSON file, and a picture of two panels."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from encoder.errors import ConfigError


def save_json(figures: Mapping[str, Any], file: Path) -> None:
    """Write all figures, for machines; missing folders are made. What was not measured (NaN) is null."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(_measured(figures), indent=2, allow_nan=False) + "\n")


def _measured(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _measured(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_measured(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def two_panels(file: Path, size: tuple[float, float]) -> Iterator[tuple[Any, Any, Any]]:
    """A figure and its left and right axes to draw on, saved at the end of the body. `size` is in inches.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
    except ImportError:
        raise ConfigError("--plot needs matplotlib: install encpool[bench]") from None
    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=size, layout="constrained")
    try:
        yield figure, left, right
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, dpi=130)
    finally:
        pyplot.close(figure)
