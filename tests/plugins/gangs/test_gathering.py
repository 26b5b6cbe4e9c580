"""Gangs that can never run, and ranks that wait behind long tasks."""

import asyncio
import time
from types import SimpleNamespace
from uuid import uuid4

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import Nanny, SpecCluster, wait
from distributed import Scheduler as DaskScheduler

from dask_p2p import iterate, spmd
from dask_p2p.errors import SectionError
from dask_p2p.plugins.gangs.coordinator import COMMIT, Coordinator
from dask_p2p.plugins.gangs.gathering import Gathering
from dask_p2p.plugins.registration import workers_of
from tests.clock import run_clocked
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


AFTER_S = 1.0


def worker(status="running", tasks=1, seceded=0):
    return SimpleNamespace(
        address="tcp://a:1",
        status=SimpleNamespace(name=status),
        processing=[*range(tasks)],
        long_running=[*range(seceded)],
        nthreads=2,
        resources={"GPU": 1},
    )


def task(state, on=None, needs=(), resources=None):
    waiting_on = [SimpleNamespace(key=key) for key in needs]
    return SimpleNamespace(
        state=state, processing_on=on, waiting_on=waiting_on, resource_restrictions=resources
    )


def scheduler_of(*tasks):
    scheduler = Scheduler()
    scheduler.tasks = {("x", rank): rank_task for rank, rank_task in enumerate(tasks)}
    return scheduler


def warnings_of(scheduler, act, after_s=AFTER_S):
    """Act while a gang is checked, by the time of the event loop; return warnings for clients."""

    async def main():
        coordinator = Coordinator(8)
        gathering = Gathering(scheduler, coordinator, after_s, asyncio.get_running_loop().time)
        gathering.add([("x", COMMIT)])
        await act(coordinator, gathering)
        gathering.close()
        assert not asyncio.get_running_loop().has_timers()
        return scheduler.warnings

    return run_clocked(main())


def warnings_of_first(scheduler):
    """Let only the first rank join and wait; return the warnings for clients."""

    async def wait(coordinator, _):
        coordinator.join("x", len(scheduler.tasks), 0, "t0", "a")
        await asyncio.sleep(2 * AFTER_S)

    return warnings_of(scheduler, wait)


def test_a_gang_of_the_same_name_has_not_waited_as_long():
    """Users compute the same graph repeatedly: one of these gangs may wait at any time."""

    async def wait(coordinator, gathering):
        for token in range(40):
            gathering.add([("x", COMMIT)])
            coordinator.join("x", 2, 0, str(token), "a")
            await asyncio.sleep(AFTER_S)
            coordinator.forget("x")
            gathering.forget(("x", COMMIT))

    scheduler = scheduler_of(task("processing"), task("processing", worker()))
    assert not warnings_of(scheduler, wait, 10 * AFTER_S)


@pytest.mark.parametrize(
    ("missing", "why"),
    [
        (task("processing", worker("paused")), "processing on tcp://a:1, which is paused"),
        (
            task("processing", worker(tasks=9, seceded=1)),
            "processing on tcp://a:1, with 8 tasks for 2 threads",
        ),
        (task("processing", worker()), "processing on tcp://a:1"),
        (task("queued"), "queued: no worker can take it now"),
        (task("no-worker"), "no-worker: no worker can take it now"),
        (task("erred"), "erred"),
    ],
)
def test_a_warning_names_the_missing_ranks_and_their_workers(own_log, missing, why):
    text = (
        "dask_p2p: x has waited for 1 s: of its 2 ranks, these are missing: rank 1, whose task is "
        f"{why}."
    )
    assert warnings_of_first(scheduler_of(task("processing"), missing)) == [text]
    assert own_log.messages == [text]


def test_the_wait_for_inputs_is_only_logged(own_log):
    missing = task("waiting", needs=["b", "a"])
    assert warnings_of_first(scheduler_of(task("processing"), missing)) == []
    assert own_log.messages[0].endswith("task is waiting for 2 tasks, such as a.")


def test_the_first_ones_are_named():
    (text,) = warnings_of_first(scheduler_of(task("processing"), *[task("queued")] * 6))
    assert "rank 4" in text
    assert "rank 5" not in text
    assert text.endswith("; and 2 more.")


def test_the_warning_is_repeated_until_the_gang_begins(monkeypatch):
    monkeypatch.setattr("dask_p2p.plugins.gangs.gathering.REMINDER_S", AFTER_S)
    scheduler = scheduler_of(task("processing"), task("queued"))

    async def wait_and_begin(coordinator, _):
        coordinator.join("x", 2, 0, "t0", "a")
        while len(scheduler.warnings) < 3:
            await asyncio.sleep(AFTER_S)
        coordinator.join("x", 2, 1, "t1", "b")
        count = len(scheduler.warnings)
        await asyncio.sleep(5 * AFTER_S)
        assert len(scheduler.warnings) == count

    warnings_of(scheduler, wait_and_begin)


def test_a_gang_that_runs_in_time_causes_no_warning():
    scheduler = scheduler_of(task("processing"), task("queued"))

    async def run_and_wait_again(coordinator, _):
        coordinator.join("x", 2, 0, "t0", "a")
        await asyncio.sleep(7 * AFTER_S)
        coordinator.join("x", 2, 1, "t1", "b")
        coordinator.drop("x", 0, "taken back")  # it has waited, but not since it ran
        coordinator.join("x", 2, 0, "again", "a")
        await asyncio.sleep(7 * AFTER_S)
        assert scheduler.warnings == []
        await asyncio.sleep(7 * AFTER_S)
        assert len(scheduler.warnings) == 1

    warnings_of(scheduler, run_and_wait_again, 10 * AFTER_S)
