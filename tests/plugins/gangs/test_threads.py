"""Ranks lend their slot in the worker's thread pool to other tasks, and none is lost."""

from __future__ import annotations

import time

import dask.array as da
import numpy as np
import pytest
from distributed import get_client, worker_client

from dask_p2p import spmd
from tests.transports.loopback import wait_until

CLUSTER = {"n_workers": 2, "threads_per_worker": 1}


def slots(dask_worker):
    executor = dask_worker.executors["default"]
    return executor._max_workers, len(executor._threads), len(dask_worker.state.long_running)


def by_client(number):
    return get_client().submit(abs, -number, pure=False).result()


def by_worker_client(number):
    with worker_client() as client:
        return client.submit(abs, -number, pure=False).result()


def by_worker_client_late(number):
    time.sleep(2.5)
    return by_worker_client(number)


@pytest.mark.parametrize("make", [by_client, by_worker_client, by_worker_client_late])
def test_a_function_may_wait_for_tasks_though_ranks_have_all_threads(client, make):
    y = spmd(lambda ctx, x: x + make(ctx.rank + 1), da.zeros(4, chunks=2))
    assert np.array_equal(y.compute(), [1, 1, 2, 2])
    wait_until(lambda: {*client.run(slots).values()} == {(1, 1, 0)})


def test_the_pool_is_as_before_after_many_gangs(client):
    def function(ctx, x, number):
        time.sleep(2.2 if number == 3 else 0)
        return x + ctx.allreduce(1.0)

    for number in range(6):
        y = spmd(function, da.full(4, float(number), chunks=2), number=number)
        assert np.array_equal(y.compute(), np.full(4, number + 2.0))
    wait_until(lambda: {*client.run(slots).values()} == {(1, 1, 0)})
