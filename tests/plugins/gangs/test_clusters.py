"""Gangs within tasks and gangs, and the slots in thread pools that their ranks lend."""

import threading
import time
import warnings
from types import SimpleNamespace

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import get_client, worker_client
from distributed.threadpoolexecutor import ThreadPoolExecutor, threads_lock
from distributed.worker import thread_state

from dask_p2p import spmd
from dask_p2p.errors import P2PWarning
from dask_p2p.plugins.dask_internals import PoolThread
from tests.support import BOUND_S, own_client
from tests.transports.loopback import wait_until

CLUSTER = {"n_workers": 2, "threads_per_worker": 1}
X = np.ones(16)


def double(ctx, x):
    return x * 2 + ctx.allreduce(0.0)


def inner(**kwargs):
    return spmd(double, da.from_array(X, chunks=4), **kwargs)


def total(**kwargs):
    return inner(**kwargs).sum().compute()


def total_with_client(**kwargs):
    with worker_client():
        return total(**kwargs)


@pytest.mark.parametrize("compute", [total, total_with_client])
def test_ordinary_tasks_may_compute_sections(client, compute):
    y = da.zeros(16, chunks=8).map_blocks(lambda x: x + compute(), dtype=float)
    np.testing.assert_array_equal(y.compute(), np.full(16, 32.0))


@pytest.mark.parametrize("compute", [total, total_with_client])
def test_a_section_of_one_rank_runs_in_the_function_of_another(client, compute):
    y = spmd(lambda ctx, x: x + compute(ranks=1), da.zeros(16, chunks=4))
    np.testing.assert_array_equal(y.compute(), np.full(16, 32.0))


def test_a_warning_names_the_section_whose_workers_an_inner_one_needs(monkeypatch):
    monkeypatch.setattr("dask_p2p.plugins.gangs.gathering.REMINDER_S", 0.5)
    with (
        dask.config.set({"p2p.sections.warn-after": "100 ms"}),
        warnings.catch_warnings(record=True) as records,
        own_client() as client,
    ):
        warnings.simplefilter("always", P2PWarning)
        section = inner()
        y = spmd(lambda ctx, x: x + section.sum().compute(), da.zeros(16, chunks=4))
        future = client.compute(y)
        text = "workers are still needed by p2p-spmd-ranks-"
        wait_until(lambda: any(text in str(record.message) for record in records))
        client.cancel(future)


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


class Worker:
    """A worker whose event loop runs callbacks at once, and keeps those for later."""

    def __init__(self):
        self.loop, self.later, self.events = self, [], []
        self.handle_stimulus = self.events.append

    def add_callback(self, function):
        function()

    def call_later(self, delay_s, function):
        self.later.append(function)
        return SimpleNamespace()

    def remove_timeout(self, timer):
        pass


@pytest.fixture
def in_pool():
    """Return a function that calls another one in a thread of a pool, with a rank's thread."""
    pool, worker = ThreadPoolExecutor(1), Worker()

    def begun(function):
        def task():
            thread_state.key, thread_state.start_time = "rank", time.time()
            return function(PoolThread(worker), pool, worker)

        return pool, pool.submit(task)

    yield begun
    pool.shutdown(wait=False)


@pytest.mark.parametrize("is_outside_pool", [False, True])
def test_a_rank_ends_while_its_pool_waits_for_it(in_pool, is_outside_pool):
    has_begun = threading.Event()

    def rank(thread, pool, worker):
        if is_outside_pool:
            thread.secede()
        has_begun.set()
        wait_until(lambda: pool._shutdown and threads_lock.locked())
        thread.secede()  # of a rank that begins to wait
        thread.close()
        return len(worker.events)

    pool, future = in_pool(rank)
    assert has_begun.wait(BOUND_S)
    pool.shutdown(wait=True, timeout=BOUND_S)  # and holds the lock all the time
    assert future.result(timeout=0) == is_outside_pool


def test_the_event_loop_does_not_wait_for_a_pool_that_shuts_down(in_pool):
    def rank(thread, pool, worker):
        (leave,) = worker.later
        with ThreadPoolExecutor(1) as loop:
            with threads_lock:  # another worker's pool waits for its threads
                loop.submit(leave).result(BOUND_S)
            assert not worker.events
            worker.later[-1]()  # once more, a little later
            thread.close()
        return pool._max_workers, len(worker.events)

    _, future = in_pool(rank)
    assert future.result(BOUND_S) == (1, 1)
