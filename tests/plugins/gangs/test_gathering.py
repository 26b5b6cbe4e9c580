"""Gangs that can never run, and ranks that wait behind long tasks."""

from __future__ import annotations

import time
from uuid import uuid4

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import Nanny, SpecCluster, wait
from distributed import Scheduler as DaskScheduler

from dask_p2p import iterate, spmd
from dask_p2p.errors import SectionError
from dask_p2p.plugins.gangs.coordinator import Coordinator
from dask_p2p.plugins.gangs.gathering import Gathering
from dask_p2p.plugins.registration import workers_of
from tests.sections.schedulers import Scheduler, Task, ranks
from tests.sections.support import nothing_is_left
from tests.support import BOUND_S, restart, result_of
from tests.transports.loopback import wait_until

GPU = {"GPU": 1}


class Looks:
    """Looks at gangs when a test calls it, by the test's clock."""

    def __init__(self, scheduler):
        self.now_s, self.scheduler, self.coordinator = 1000.0, scheduler, Coordinator(8)
        self.gathering = Gathering(scheduler, self.coordinator, 10.0, lambda: self.now_s)
        self.gathering._schedule_check = lambda: None
        self.gathering.add(scheduler.tasks)

    def after(self, seconds):
        """Look twice a second for some seconds; return the errors that have come."""
        for _ in range(int(2 * seconds) + 1):
            self.gathering.check_gangs()
            self.now_s += 0.5
        self.now_s -= 0.5
        return [*self.scheduler.ended.values()]


def short():
    scheduler = Scheduler(GPU, GPU)
    scheduler.gang(*ranks(3, GPU))
    return scheduler


def test_a_gang_that_never_can_run_is_ended():
    looks = Looks(short())
    assert looks.after(0.5) == []
    (error,) = looks.after(1.0)
    assert type(error) is SectionError
    assert "3 ranks, which run at the same time. 3 of them need 1 unit" in str(error)
    assert looks.after(60.0) == [error], "once"


def test_a_worker_that_was_lost_may_come_back():
    looks = Looks(short())
    looks.gathering.record_lost()
    assert looks.after(25.0) == []
    assert len(looks.scheduler.warnings) == 1, "a warning names the lack"
    assert "enough for 2 ranks" in looks.scheduler.warnings[0]
    looks.scheduler.add_worker("c", GPU)
    assert looks.after(600.0) == []
    looks = Looks(short())
    looks.gathering.record_lost()
    assert len(looks.after(31.0)) == 1
    looks = Looks(short())
    looks.gathering.record_lost()
    looks.gathering.record_joined()
    assert len(looks.after(2.0)) == 1, "another gang of its name has replaced it"


def test_a_gang_that_could_run_waits_for_long():
    looks = Looks(short())
    looks.scheduler.add_worker("c", GPU)
    assert looks.after(10.0) == []
    del looks.scheduler.workers["c"]
    assert looks.after(60.0) == []
    assert len(looks.after(300.0)) == 1


def test_an_adaptive_cluster_may_get_more_workers():
    looks = Looks(short())
    for _ in range(600):
        looks.gathering.record_target()
        assert looks.after(1.0) == []
    assert len(looks.scheduler.warnings) == 1
    assert len(looks.after(31.0)) == 1, "it is adaptive no more"


def test_a_cluster_without_workers_may_get_some():
    looks = Looks(short())
    looks.scheduler.workers.clear()
    assert looks.after(600.0) == []


def test_gangs_are_not_looked_at_when_they_run_or_have_ended():
    looks = Looks(short())
    for rank in range(3):
        looks.coordinator.join("x", 3, rank, str(rank), "a")
    assert looks.after(60.0) == []
    looks.coordinator.drop("x", 0, "a worker died")
    assert looks.after(60.0) == [], "it has run, and may again"
    looks.scheduler.tasks["x", "commit"].state = "memory"
    assert looks.after(600.0) == []
    looks.gathering.forget(("x", "commit"))
    del looks.scheduler.tasks["x", "commit"]
    assert looks.after(1.0) == []


def placed(needs=None):
    """A gang with a rank on each of two workers."""
    scheduler = Scheduler(GPU, GPU, GPU)
    tasks = ranks(2, needs)
    for task, worker in zip(tasks, "ab", strict=True):
        task.state, task.processing_on = "processing", scheduler.workers[worker]
    scheduler.gang(*tasks)
    return scheduler


@pytest.mark.parametrize("needs", [None, GPU])
def test_ranks_behind_long_tasks_go_elsewhere(needs):
    looks = Looks(placed(needs))
    busy = Task("busy", needs, is_rank=False)
    looks.scheduler.workers["a"].executes(busy, 2.0)
    looks.after(2.0)
    assert looks.scheduler.moved == [], "it may end soon"
    looks.scheduler.workers["a"].executes(busy, 4.0)
    looks.scheduler.tasks["x", 1].state = "waiting"
    looks.after(2.0)
    assert looks.scheduler.moved == [], "while inputs are made it may end"
    looks.scheduler.tasks["x", 1].state = "processing"
    looks.after(0.0)
    assert looks.scheduler.moved == [("x", 0)]


@pytest.mark.parametrize("case", ["all are full", "restricted", "has joined", "behind a rank"])
def test_ranks_stay_where_nothing_is_gained(case):
    looks = Looks(placed(GPU))
    workers = looks.scheduler.workers
    busy = Task("busy", GPU, is_rank=case == "behind a rank")
    for worker in workers.values() if case == "all are full" else [workers["a"]]:
        worker.executes(busy, 60.0)
    if case == "restricted":
        looks.scheduler.tasks["x", 0].worker_restrictions = {"a"}
    if case == "has joined":
        looks.coordinator.join("x", 2, 0, "t", "a")
    looks.after(9.0)
    assert looks.scheduler.moved == []
    assert not looks.scheduler.ended


# --- on a cluster as users have it: two workers with a GPU each, and one without


@pytest.fixture(scope="module")
def cluster():
    units = ({"GPU": 1}, {"GPU": 1}, {})
    workers = {
        number: {"cls": Nanny, "options": {"nthreads": 2, "resources": resources}}
        for number, resources in enumerate(units)
    }
    scheduler = {"cls": DaskScheduler, "options": {"dashboard_address": ":0"}}
    with SpecCluster(scheduler=scheduler, workers=workers) as cluster:
        cluster.wait_for_workers(3, timeout=BOUND_S)
        yield cluster


def addresses(client):
    return {worker["name"]: address for address, worker in workers_of(client).items()}


def summed(ctx, x, of):
    """A new function for each test, so that no test gets the results of another."""
    return x + ctx.allreduce(1.0)


def array(chunks=2):
    """Return an array of its own: Dask keeps the restrictions of tasks of the same name."""
    return da.ones(12, chunks=chunks, name=f"ones-{uuid4().hex}")


def test_by_default_each_worker_with_the_annotated_units_has_a_rank(client):
    def size(ctx, x):
        return np.full_like(x, ctx.size)

    with dask.annotate(resources=GPU):
        assert (spmd(size, array()).compute() == 2).all()
        y = iterate(lambda u: u[1:-1], array(), {0: 1}, 3)
        assert np.array_equal(y.compute(), np.ones(12))
    assert (spmd(size, array()).compute() == 3).all()


@pytest.mark.slow
def test_ranks_that_have_no_worker_are_refused_by_name(client):
    nowhere, (gpu, _, free_worker) = "tcp://127.0.0.1:1", map(addresses(client).get, range(3))
    refused = (
        ({"resources": {"GPU": 2}}, r"need 2 units of resource 'GPU' each, .* have 2 units"),
        ({"workers": [nowhere]}, "2 of them are restricted .*tcp://127.0.0.1:1"),
        ({"workers": [nowhere], "allow_other_workers": False}, "2 of them are restricted"),
        ({"workers": [free_worker], "resources": GPU}, r"have 0 units in all"),
        ({"workers": [gpu], "resources": GPU}, r"have 1 unit in all, enough for 1 rank"),
    )
    for number, (kwargs, match) in enumerate(refused):
        y = spmd(summed, array(), ranks=2, of=f"refused {number}")
        with pytest.raises(SectionError, match=match):
            y.compute(**kwargs)
    for kwargs in (
        {"workers": [nowhere], "allow_other_workers": True},
        {"workers": [free_worker]},
        {"workers": [gpu, nowhere]},
    ):
        y = spmd(summed, array(), ranks=2, of="workers")
        assert np.array_equal(result_of(client, client.compute(y, **kwargs)), np.full(12, 3.0))
    del y
    nothing_is_left(client)


def slow(block):
    time.sleep(0.1)
    return block + 1


def free_units(dask_worker):
    return dask_worker.state.available_resources.get("GPU")


@pytest.mark.slow
def test_a_rank_that_waits_lends_its_units(client):
    """To the inputs of others, and to other gangs. Else all would wait for each other."""
    y = spmd(summed, array(1).map_blocks(slow), ranks=2, of="inputs")
    assert np.array_equal(result_of(client, client.compute(y, resources=GPU)), np.full(12, 4.0))
    gangs = [
        spmd(summed, (array(1) * number).map_blocks(slow), ranks=2, of="gangs")
        for number in range(6)
    ]
    short_tasks = client.map(time.sleep, [0.05] * 20, resources=GPU, pure=False)
    futures = [client.compute(gang, resources=GPU) for gang in gangs]
    for number, future in enumerate(futures):
        assert np.array_equal(result_of(client, future), np.full(12, number + 3.0))
    del future, futures, short_tasks, gangs, y
    nothing_is_left(client)
    wait(client.submit(time.sleep, 0.1, resources=GPU, pure=False))
    # Tasks that were released while they ran have their units until they end.
    wait_until(lambda: sorted(client.run(free_units).values(), key=str) == [1, 1, None])


def test_units_that_others_have_are_waited_for(client):
    gpu = addresses(client)[0]
    blocking = client.submit(time.sleep, 2.0, workers=[gpu], resources=GPU, pure=False)
    y = spmd(summed, array(), ranks=2, of="taken")
    assert np.array_equal(result_of(client, client.compute(y, resources=GPU)), np.full(12, 3.0))
    assert blocking.done()


@pytest.mark.slow
def test_a_worker_full_of_long_tasks_does_not_keep_a_gang(client):
    busy = addresses(client)[2]
    blocking = client.map(time.sleep, [1000.0, 1001.0], workers=[busy], pure=False)
    y = spmd(summed, array(), ranks=3, of="full")
    z = iterate(lambda u: u[1:-1], array(), {0: 1}, 3, ranks=3)
    for future, value in ((client.compute(y), 4.0), (client.compute(z), 1.0)):
        assert np.array_equal(result_of(client, future), np.full(12, value))
    assert not any(future.done() for future in blocking)
    client.cancel(blocking)
    restart(client, [busy])
