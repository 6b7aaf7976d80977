"""What a worker's process settles: memory that pictures leave is there for the next ones."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PICTURES = """
import resource
import numpy
from workers.process import keep_freed_memory
{}
def pages(count):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for number in range(count):
        numpy.ones(4_000_000 + 100_000 * (number * 7 % 13), numpy.uint8)  # of changing sizes
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
pages(5)
print(pages(50))
"""


def pages_taken(first: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", PICTURES.format(first)], capture_output=True, text=True, check=True, timeout=60
    )
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators have no such setting")
def test_pictures_of_changing_sizes_take_no_new_pages() -> None:
    assert pages_taken("keep_freed_memory()") < 0.2 * pages_taken("")
