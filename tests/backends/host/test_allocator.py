"""Buffers of NumPy's calls stay with a worker's process."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import dask.array as da
import numpy as np
import pytest
from distributed import Client, LocalCluster

import dask_p2p
from dask_p2p.backends import host_memory as allocator
from tests.support import BOUND_S

PRELUDE = """
import resource, runpy, sys, threading, time
import numpy as np

def rss():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

def faults():
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt

# The module alone: the package would take as long again to import.
allocator = runpy.run_path(sys.argv[1]) if sys.argv[1:] else None
"""
# Page faults of 200 calls of a ufunc, on views, in a thread that is not the first.
CALLS = """
def call():
    u, out = np.ones((130, 130)), np.ones((130, 130))[1:-1, 1:-1]
    np.add(u[:-2, 1:-1], u[2:, 1:-1], out=out)
    before = faults()
    for _ in range(200):
        np.add(u[:-2, 1:-1], u[2:, 1:-1], out=out)
    print(faults() - before)
"""
ALONE = """
if allocator:
    allocator["keep_small_buffers"]()
thread = threading.Thread(target=call)
thread.start()
thread.join()
"""
ON_A_WORKER = """
from distributed import Client, LocalCluster
import dask_p2p

with LocalCluster(1, processes=False, dashboard_address=None) as cluster, Client(cluster) as client:
    dask_p2p.register(client)
    client.submit(call).result()
"""


def number(*programs, module=None, threshold="65536"):
    """Run programs one after the other in a process; return the number that they print."""
    env = {key: value for key, value in os.environ.items() if key != "MALLOC_TRIM_THRESHOLD_"}
    if threshold is not None:
        env["MALLOC_TRIM_THRESHOLD_"] = threshold
    command = [sys.executable, "-c", "".join([PRELUDE, *programs]), *([module] if module else [])]
    process = subprocess.run(command, env=env, check=True, capture_output=True, timeout=BOUND_S)
    return int(process.stdout)


@pytest.mark.parametrize("threshold", ["65536", "much", None])
def test_no_call_of_a_ufunc_touches_new_pages(threshold):
    assert number(CALLS, ALONE, module=allocator.__file__, threshold=threshold) < 100


# Page faults of 20 temporaries of 4 MiB; it ends once the memory has returned to the system.
TEMPORARIES = """
def work():
    global pages
    x = np.ones(2**19)
    with allocator["keep_temporaries"]():
        for _ in range(3):
            y = (x + 1) * 2 - x  # several temporaries at a time
        before = faults()
        for _ in range(20):
            y = (x + 1) * 2 - x
        pages = faults() - before
        del y

before = rss()
thread = threading.Thread(target=work)
thread.start()
thread.join()
while rss() - before > 8 * 2**20:
    time.sleep(0.05)
print(pages)
"""


def test_temporaries_of_a_rank_reuse_their_pages():
    """And return them afterwards."""
    assert number(TEMPORARIES, module=allocator.__file__) < 2000


# The memory of the process over its start, once nothing is kept. The thread's heap has a free end.
OUTPUTS = """
def work():
    with allocator["keep_temporaries"]():
        for _ in range(3):
            y = [np.ones(2**18) for _ in range(20)]
            del y
    ended.set()
    is_over.wait()  # glibc gives the heap of a thread that is over to the next one

ended, is_over = threading.Event(), threading.Event()
before = rss()
thread = threading.Thread(target=work)
thread.start()
ended.wait()
while allocator["keep_temporaries"].__wrapped__.__globals__["_timer"] is not None:
    time.sleep(0.05)
print(rss() - before)
is_over.set()
thread.join()
"""


def test_the_end_of_a_heap_returns_to_the_system():
    assert number(OUTPUTS, module=allocator.__file__) < 8 * 2**20


@pytest.mark.slow
@pytest.mark.cluster
def test_nor_in_a_task():
    assert number(CALLS, ON_A_WORKER) < 100


def faults_of_steps(ctx, x):
    """Count the new pages of twenty steps of plain expressions."""
    before = 0
    for step in range(23):
        if step == 3:
            before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        x = (x + 1) * 2 - x
    return x, float(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before)


def faults_of_a_block(x):
    """Return a block like this one, with the number of new pages of twenty steps."""
    _, pages = faults_of_steps(None, x)
    return np.full_like(x, pages)


def test_temporaries_on_workers_with_nannies():
    """Of ranks, and of functions of large blocks: 10,000 with new pages for each temporary."""
    x = da.ones((2, 2**19), chunks=(1, -1))
    with LocalCluster(2, threads_per_worker=1, dashboard_address=":0") as cluster, Client(cluster):
        _, pages = dask_p2p.spmd(faults_of_steps, x, per_rank=[0.0])
        assert pages.max().compute() < 2000
        y = dask_p2p.map_overlap(faults_of_a_block, x, depth=1, boundary="periodic", dtype=float)
        assert y.max().compute() < 2000
