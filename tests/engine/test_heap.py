"""Memory that a step has freed, in a process of its own."""

import subprocess
import sys

import pytest

STEP = """
import os
import numpy as np
from workbench.engine import heap

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

heap.keep_freed()
before = resident()
tensors = [np.ones(2**17 * size) for size in (2, 4, 8)]  # MiB
del tensors
kept = resident()
heap.give_back()
print(kept - before, resident() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="these are settings of glibc")
def test_freed_memory_stays_until_it_is_given_back():
    done = subprocess.run([sys.executable, "-c", STEP], capture_output=True, text=True, check=True)
    kept, left = map(float, done.stdout.split())
    assert kept > 13
    assert left < 4
