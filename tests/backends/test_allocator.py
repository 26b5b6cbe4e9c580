"""Buffers of NumPy's calls stay with a worker's process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# Page faults of 200 calls of a ufunc, on views, in a thread that is not the first.
PROGRAM = """
import resource, threading
import numpy as np
from dask_p2p.backends.allocator import keep_small_buffers

{first}
u, out = np.ones((130, 130)), np.ones((130, 130))[1:-1, 1:-1]

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def call():
    np.add(u[:-2, 1:-1], u[2:, 1:-1], out=out)
    before = faults()
    for _ in range(200):
        np.add(u[:-2, 1:-1], u[2:, 1:-1], out=out)
    print(faults() - before)

thread = threading.Thread(target=call)
thread.start()
thread.join()
"""


def faults(first: str, threshold: str | None) -> int:
    env = {key: value for key, value in os.environ.items() if key != "MALLOC_TRIM_THRESHOLD_"}
    if threshold is not None:
        env["MALLOC_TRIM_THRESHOLD_"] = threshold
    program = PROGRAM.format(first=first)
    command = [sys.executable, "-c", program]
    return int(subprocess.run(command, env=env, check=True, capture_output=True).stdout)


@pytest.mark.parametrize("threshold", ["65536", "0", str(2**21), "much", None])
def test_no_call_of_a_ufunc_touches_new_pages(threshold):
    assert faults("keep_small_buffers()", threshold) < 100


def test_dask_s_own_threshold_gives_buffers_back():
    assert faults("", "65536") > 1000
