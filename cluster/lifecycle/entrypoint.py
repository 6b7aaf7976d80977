"""Ray notes the command line of whoever connects, as UTF-8: a file's name in it may be other bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def readable_entrypoint() -> Iterator[None]:
    """While Ray connects, let it read bytes that are no UTF-8 as escapes; it would fail on them."""
    from ray._private import utils

    of_ray = getattr(utils, "get_entrypoint_name", None)
    if of_ray is None:  # another version of Ray
        yield
        return
    name: str = of_ray()
    utils.get_entrypoint_name = lambda: name.encode(errors="backslashreplace").decode()
    try:
        yield
    finally:
        utils.get_entrypoint_name = of_ray
