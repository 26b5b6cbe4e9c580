"""Gangs whose results the function of another gang waits for."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from types import SimpleNamespace

import dask.array as da
import numpy as np
import pytest
from distributed import get_client, get_worker, worker_client

from dask_p2p import iterate, spmd
from dask_p2p.errors import InputError, SectionError
from dask_p2p.plugins.gangs.coordinator import COMMIT
from dask_p2p.plugins.gangs.nesting import Nesting

CLUSTER = {"n_workers": 2, "threads_per_worker": 1}


class Scheduler:
    """Accepts graphs like Dask's scheduler, which calls the plugin then."""

    def __init__(self):
        self.tasks = {(gang, COMMIT): SimpleNamespace() for gang in ("x", "y", "z")}
        self.nesting = Nesting(self, lambda: True)

    def _create_taskstate_from_graph(self, *, keys, client, submitting_task):
        self.nesting.add_submitted(client, keys)

    def submit(self, *keys, by=None, client="Client-1"):
        self._create_taskstate_from_graph(keys=keys, client=client, submitting_task=by)


def test_outer_gangs_are_found_through_other_tasks():
    scheduler = Scheduler()
    scheduler.submit(("x", 0), ("x", COMMIT), by="task")
    scheduler.submit("task", by=("x", 0))
    scheduler.submit(("y", 0), ("y", COMMIT), by="task")
    scheduler.submit(("z", COMMIT), by=("y", 0))
    assert [*scheduler.nesting.outer("x")] == [], "the task was none of a gang yet"
    assert [*scheduler.nesting.outer("y")] == ["x"]
    assert [*scheduler.nesting.outer("z")] == ["y", "x"]
    scheduler.nesting.forget(("y", COMMIT))
    assert [*scheduler.nesting.outer("z")] == ["y"]


def test_a_gang_that_computes_itself_has_an_end():
    scheduler = Scheduler()
    scheduler.submit(("x", COMMIT), by=("x", 0))
    assert [*scheduler.nesting.outer("x")] == []


def test_gangs_of_threads_of_workers_are_known():
    scheduler = Scheduler()
    scheduler.submit(("x", COMMIT), client="Client-worker-1")
    scheduler.submit(("y", COMMIT), client="Client-1")
    scheduler.submit(("z", COMMIT), client="Client-worker-1", by="task")
    assert [*map(scheduler.nesting.may_be_inner, "xyz")] == [True, False, False]
    scheduler.nesting.forget(("x", COMMIT))
    assert not scheduler.nesting.may_be_inner("x")


# --- on a cluster


def double(ctx, x, of):
    """A new function for each test, so that no test gets the results of another."""
    return x * 2 + ctx.allreduce(0.0)


def inner(of):
    return spmd(double, da.ones(16, chunks=4), of=of)


def task(of="task"):
    with suppress(ValueError):  # outside of a task, where the test's client is the current one
        get_worker()
        get_client()  # the section has one rank in a process without a client
    return inner(of).sum().compute()


def task_with_client(of="with client"):
    with worker_client():
        return inner(of).sum().compute()


def of_first(make):
    """Return a function whose first rank adds a new array."""
    return lambda ctx, x: x + (make() if ctx.rank == 0 else 32.0)


def captured():
    made = inner("captured")
    return of_first(lambda: made.sum().compute())


def captured_stencil():
    made = iterate(lambda u: u[1:-1], da.ones(16, chunks=4), {0: 1}, 2)
    return of_first(lambda: made.sum().compute())


def by_client():
    made = inner("by client")
    return of_first(lambda: get_client().compute(made.sum()).result())


def by_worker_client():
    made = inner("by worker client")

    def make():
        with worker_client() as client:
            return client.gather(client.compute(made.sum()))

    return of_first(make)


def persisted():
    made = inner("persisted")
    return of_first(lambda: made.persist().sum().compute())


def submitted(function):
    return lambda: of_first(lambda: get_client().submit(function, pure=False).result())


WAYS = {
    "captured": captured,
    "captured stencil": captured_stencil,
    "by a client": by_client,
    "by a client of a worker": by_worker_client,
    "persisted": persisted,
    "by a task": submitted(partial(task, "submitted")),
    "by a task with a client": submitted(partial(task_with_client, "submitted with client")),
}


QUICK = ("captured", "by a task")


@pytest.mark.parametrize(
    "way",
    [pytest.param(way, marks=[] if way in QUICK else [pytest.mark.slow]) for way in WAYS],
)
def test_gangs_that_would_wait_for_each_other_are_refused_by_name(client, way):
    y = spmd(WAYS[way](), da.zeros(16, chunks=4))
    match = r"p2p-\w+-ranks-\w+ is computed by the function of p2p-spmd-ranks-\w+, and needs"
    with pytest.raises(SectionError, match=match):
        y.compute()
    assert task(f"after {way}") == 32.0


def in_thread(make):
    def run():
        get_client()  # it becomes the current one
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(make).result()

    return of_first(run)


def test_sections_in_a_further_thread_are_refused(client):
    y = spmd(in_thread(task), da.zeros(16, chunks=4))
    with pytest.raises(InputError, match="in another thread of its process"):
        y.compute()
    assert task("after a thread") == 32.0


def test_ordinary_tasks_may_compute_sections(client):
    def block(x, with_client):
        return x + (task_with_client() if with_client else task())

    for with_client in (True, False):
        y = da.zeros(16, chunks=8).map_blocks(block, with_client, dtype=float)
        assert np.array_equal(y.compute(), np.full(16, 32.0))
