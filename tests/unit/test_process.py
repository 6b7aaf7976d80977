"""What a worker's process settles: memory that pictures leave is there for the next ones, while any come."""

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


KEPT = """
import threading
import numpy
from workers.process import QUIET_S, FreedMemory, keep_freed_memory
keep_freed_memory()
now_s, small = 0.0, []
freed = FreedMemory(now_s=lambda: now_s)
def decode():
    pictures = []
    for number in range(16):
        pictures.append(numpy.ones(8_000_000, numpy.uint8))
        small.append(numpy.ones(2_000, numpy.uint8))  # lives on, between them
def resident():
    pages = int(open("/proc/self/statm").read().split()[1])
    return pages * 4096 // 1_000_000
before = resident()
for number in range(4):
    thread = threading.Thread(target=decode)
    thread.start()
    thread.join()
for num_items, now_s in [(4, 0.0), (5, QUIET_S), (5, 1.5 * QUIET_S), (5, 2 * QUIET_S)]:
    freed.look(num_items)
    print(resident() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators have no such setting")
def test_what_pictures_leave_goes_back_once_no_more_of_them_come() -> None:
    done = subprocess.run([sys.executable, "-c", KEPT], capture_output=True, text=True, check=True, timeout=60)
    *busy, quiet = map(int, done.stdout.split())
    assert min(busy) > 100  # megabytes
    assert quiet < 0.3 * min(busy)
