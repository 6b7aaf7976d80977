"""Arrays that a grid of patches determines, kept for the grids that came last: bounded by bytes, not by grids.

A grid may have a thousand times the patches of another, so a number of grids bounds nothing.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import wraps
from typing import ParamSpec, TypeVar

import numpy as np

Arguments = ParamSpec("Arguments")
Arrays = TypeVar("Arrays", bound=Iterable[np.ndarray])

MAX_BYTES = 64 << 20
"""Of each function: the tables of a hundred images of 4,096 patches where they are largest."""


def cached_arrays(compute: Callable[Arguments, Arrays], *, max_bytes: int = MAX_BYTES) -> Callable[Arguments, Arrays]:
    """`compute`, which remembers what it was asked last, as far as that fits. For any thread; all share the arrays."""
    kept: OrderedDict[object, Arrays] = OrderedDict()
    lock, used = threading.Lock(), 0

    @wraps(compute)
    def cached(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Arrays:
        nonlocal used
        key = (args, *sorted(kwargs.items()))
        with lock:
            if key in kept:
                kept.move_to_end(key)
                return kept[key]
        arrays = compute(*args, **kwargs)
        with lock:
            if key not in kept:  # another thread may have been as far
                kept[key] = arrays
                used += _num_bytes(arrays)
            while used > max_bytes:
                used -= _num_bytes(kept.popitem(last=False)[1])
        return arrays

    return cached


def _num_bytes(arrays: Iterable[np.ndarray]) -> int:
    return sum(array.nbytes for array in arrays)
