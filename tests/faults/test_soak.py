"""Transposes one after another in one cluster: memory, files, threads and leases stay flat."""

import gc
import threading

import dask
import psutil
import pytest

import dask_p2p
from tests.faults.support import BOUND_S, assert_nothing_is_held, expected, source

SHAPE = (256, 256)  # 512 kiB
PARTS = {"p2p.transports.part-bytes": "8 kiB"}
CLUSTER = {"n_workers": 2, "options": PARTS}
WARM_UP = 45  # until pools, caches and Dask's own logs of bounded length have grown
MIB = 2**20

# Dask's own logs grow by 20 kiB a run, with its own rechunk too. A leak of a block would be 128 kiB
# a run, one of all regions 192 kiB.
MOST_BYTES_A_RUN = 32 * 1024
MOST_OTHER_BYTES = 4 * MIB  # an allocator grows by 2 MiB at a time, in one of several threads
MOST_FILES = 3  # connections that Dask makes; a leak of one file a run would be 15
MOST_THREADS = 2  # of pools that start a thread when all they have are busy


def measure(dask_worker):
    gc.collect()
    process = psutil.Process()
    return {
        "memory": process.memory_info().rss,
        "files": process.num_fds(),
        "threads": threading.active_count(),
    }


def run(client, x, number):
    for i in range(number):
        y = dask_p2p.transpose(x, chunks=(64 + i % 64, -1))
        result = client.compute(y).result(timeout=BOUND_S)
        assert (result == expected(SHAPE).T).all()


@pytest.mark.slow
@pytest.mark.parametrize("runs", [150, pytest.param(1000, marks=pytest.mark.long)])
@pytest.mark.parametrize("order", [["cma"], ["comm"], ["ucx"]], ids=str)
def test_nothing_grows(client, runs, order):
    with dask.config.set({"p2p.transports.order": order}):
        x = client.persist(source(SHAPE, (128, 256)))
        run(client, x, WARM_UP)
        before = client.run(measure)
        run(client, x, runs - WARM_UP)
        after = client.run(measure)
        assert_nothing_is_held(client)
    for worker in before:
        grown = {name: after[worker][name] - before[worker][name] for name in before[worker]}
        assert grown.pop("memory") < MOST_OTHER_BYTES + (runs - WARM_UP) * MOST_BYTES_A_RUN
        assert grown["files"] <= MOST_FILES, grown
        assert grown["threads"] <= MOST_THREADS, grown
