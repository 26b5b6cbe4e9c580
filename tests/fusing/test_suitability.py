from __future__ import annotations

from dataclasses import replace

import dask.array as da
import numpy as np
import pytest

import dask_p2p
from dask_p2p.errors import UnsupportedArrayError
from dask_p2p.fusing.planning.planner import programs_of
from dask_p2p.fusing.suitability import Cluster, check_count, check_suitable, ranks_for
from tests.fusing.support import read_arrays, smoothed, tasks_and_sizes
from tests.support import tune

CLUSTER_OF_4 = Cluster(workers=4, threads=8, memory_bytes=2**30, has_resources=False)


def array(n=64, rows=8):
    return da.from_array(np.ones((n, n)), chunks=(rows, n))


def check(x, size=4, cluster=CLUSTER_OF_4, kind="numpy"):
    tasks, sizes = tasks_and_sizes(x)
    check_suitable(tasks, programs_of(tasks, size, sizes), sizes, cluster, kind)


def test_few_tasks():
    with pytest.raises(
        UnsupportedArrayError, match=r"and no tasks besides the 8 outputs \(4 for each of 4 r"
    ):
        check(array() + 1)
    with pytest.raises(
        UnsupportedArrayError, match=r": 1 exchange .* and about 1 task besides the 4 outputs"
    ):
        check(smoothed(array(rows=16), 1))
    check(smoothed(array(rows=16), 3))


def read():
    return np.ones((64, 64))


def test_memory_of_gpus():
    """The memory limit of a worker is that of its host memory."""
    cluster = Cluster(4, 4, 2**13, has_resources=False, device_bytes=2**30)
    check(smoothed(array(), 6), 4, cluster, "cupy")
    check(smoothed(array(), 6), 4, replace(cluster, device_bytes=0), "cupy")
    small = replace(cluster, memory_bytes=0, device_bytes=2**13)
    with pytest.raises(
        UnsupportedArrayError, match=r"at most 4.00 kiB in the memory of a worker's GPU, 8.00"
    ):
        check(smoothed(array(), 6), 4, small, "cupy")


def test_balance():
    x = dask_p2p.rechunk(array(256, 16), (256, 256))  # one block
    for _ in range(30):
        x = x * 2 + x.sum()
    with pytest.raises(UnsupportedArrayError, match="about the same work for all ranks"):
        check(x)


def test_very_many_tasks(monkeypatch):
    tasks = read_arrays(smoothed(array(), 6))[1]
    check_count(tasks)
    tune(monkeypatch, fused_tasks=40)
    with pytest.raises(UnsupportedArrayError, match="at most 40 tasks, got"):
        check_count(tasks)


def test_ranks():
    def ranks(x, cluster=CLUSTER_OF_4):
        return ranks_for(*tasks_and_sizes(x), cluster)

    assert ranks(smoothed(array(), 6)) == 4
    assert ranks(smoothed(array(rows=32), 6)) == 2
    assert ranks(smoothed(array(2048, 64), 6)) == 8
    assert ranks(smoothed(array(), 6), Cluster(0, 0, 0, has_resources=False)) == 1
