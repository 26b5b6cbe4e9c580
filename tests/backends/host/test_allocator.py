"""Buffers of NumPy's calls stay with a worker's process."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from dask_p2p.backends.host import allocator

# Page faults of 200 calls of a ufunc, on views, in a thread that is not the first.
CALLS = """
import resource, runpy, threading
import numpy as np

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def call():
    u, out = np.ones((130, 130)), np.ones((130, 130))[1:-1, 1:-1]
    np.add(u[:-2, 1:-1], u[2:, 1:-1], out=out)
    before = faults()
    for _ in range(200):
        np.add(u[:-2, 1:-1], u[2:, 1:-1], out=out)
    print(faults() - before)

"""
ALONE = (
    CALLS
    + """
if {path!r}:  # the module alone: the package would take as long again to import
    runpy.run_path({path!r})["keep_small_buffers"]()
thread = threading.Thread(target=call)
thread.start()
thread.join()
"""
)
ON_A_WORKER = (
    CALLS
    + """
from distributed import Client, LocalCluster
import dask_p2p

with LocalCluster(1, processes=False, dashboard_address=None) as cluster, Client(cluster) as client:
    dask_p2p.register(client)
    client.submit(call).result()
"""
)


def faults(program: str, threshold: str | None) -> int:
    env = {key: value for key, value in os.environ.items() if key != "MALLOC_TRIM_THRESHOLD_"}
    if threshold is not None:
        env["MALLOC_TRIM_THRESHOLD_"] = threshold
    command = [sys.executable, "-c", program]
    return int(subprocess.run(command, env=env, check=True, capture_output=True).stdout)


@pytest.mark.parametrize("threshold", ["65536", "0", str(2**21), "much", None])
def test_no_call_of_a_ufunc_touches_new_pages(threshold):
    assert faults(ALONE.format(path=allocator.__file__), threshold) < 100


def test_dask_s_own_threshold_gives_buffers_back():
    assert faults(ALONE.format(path=""), "65536") > 1000


def test_what_the_process_was_started_with_counts(monkeypatch, tmp_path):
    """Where glibc chooses by itself it would stop to do so."""
    called = []
    libc = SimpleNamespace(mallopt=lambda *args: called.append(args))
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda _: libc)
    monkeypatch.setattr(allocator, "_ENVIRONMENT", tmp_path / "environ")
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "65536")
    allocator.keep_small_buffers()  # on a system without such files
    for variables in (
        b"",
        b"A=1\0B=MALLOC_TRIM_THRESHOLD_=0\0",
        b"MALLOC_TRIM_THRESHOLD_=1048576\0",
    ):
        (tmp_path / "environ").write_bytes(variables)
        allocator.keep_small_buffers()
    assert not called
    (tmp_path / "environ").write_bytes(b"A=1\0MALLOC_TRIM_THRESHOLD_=65536\0")
    allocator.keep_small_buffers()
    assert called == [(-1, 2**20)]
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda _: object())
    allocator.keep_small_buffers()  # with another C library


@pytest.mark.cluster
def test_nor_in_a_task():
    assert faults(ON_A_WORKER, "65536") < 100
