"""Where ranks of a gang go whose workers have few units of a resource."""

from __future__ import annotations

from collections import Counter

import pytest

from dask_p2p.engine.task import WaitTask
from dask_p2p.plugins.placement import allowed_workers, is_full, place_rank, unstarted
from tests.sections.schedulers import Scheduler, Task, ranks

GPU = {"GPU": 1}


class Block:
    """An input that some workers have."""

    def __init__(self, *workers):
        self.who_has = workers

    def get_nbytes(self):
        return 100


def placed(scheduler, *tasks):
    """Place the tasks of a gang one after the other; return their workers."""
    commit = Task(("x", "commit"), is_rank=False)
    commit.run_spec, commit.dependencies = object.__new__(WaitTask), {*tasks}
    for worker in scheduler.workers.values():
        worker.occupancy = 0.0
    for task in tasks:
        task.dependents = {commit}
    for task in tasks:
        task.processing_on = place_rank(scheduler, task)
    return [task.processing_on and task.processing_on.address for task in tasks]


def test_a_rank_leaves_the_worker_that_another_needs():
    scheduler = Scheduler(GPU, GPU)
    anywhere, only = Task(("x", 0), GPU), Task(("x", 1), GPU, workers={"a"})
    anywhere.dependencies = {Block(scheduler.workers["a"])}
    assert placed(scheduler, anywhere, only) == ["b", "a"]


def test_a_worker_with_more_threads_gets_more_ranks():
    scheduler = Scheduler({}, {})
    scheduler.workers["b"].nthreads = 3
    assert Counter(placed(scheduler, *ranks(4))) == {"a": 1, "b": 3}
    assert Counter(placed(scheduler, *ranks(2))) == {"a": 1, "b": 1}


def test_ranks_go_where_their_inputs_are():
    """Also two ranks of one worker that follow each other."""
    scheduler = Scheduler({}, {})
    for worker in scheduler.workers.values():
        worker.nthreads = 2
    tasks = ranks(4)
    for task, name in zip(tasks, "bbaa", strict=True):
        task.dependencies = {Block(scheduler.workers[name])}
    assert placed(scheduler, *tasks) == ["b", "b", "a", "a"]
    for task in tasks:
        task.processing_on, task.dependencies = None, {Block(scheduler.workers["b"])}
    assert Counter(placed(scheduler, *tasks)) == {"a": 2, "b": 2}


def test_ranks_without_room_wait_somewhere():
    assert Counter(placed(Scheduler(GPU), *ranks(2, GPU))) == {"a": 2}
    assert placed(Scheduler({}), *ranks(2, GPU)) == [None, None]
    scheduler = Scheduler(GPU, {"GPU": 3})
    scheduler.workers["a"].nthreads = 3
    assert Counter(placed(scheduler, *ranks(4, GPU))) == {"a": 1, "b": 3}


@pytest.mark.parametrize(
    ("restrictions", "expected_workers"),
    [
        ({}, "abc"),
        ({"needs": GPU}, "ab"),
        ({"workers": {"a", "gone"}}, "a"),
        ({"workers": {"a"}, "hosts": {"host-c"}}, "ac"),
        ({"workers": {"c"}, "needs": GPU}, ""),
        ({"workers": {"gone"}}, ""),
        ({"workers": {"gone"}, "loose": True}, "abc"),
        ({"workers": {"c"}, "needs": GPU, "loose": True}, "ab"),
    ],
)
def test_restrictions_are_those_of_dask(restrictions, expected_workers):
    scheduler = Scheduler(GPU, GPU, {})
    task = Task(("x", 0), **restrictions)
    assert {ws.address for ws in allowed_workers(scheduler, task)} == {*expected_workers}
    assert placed(scheduler, task)[0] in (*expected_workers, None)


def test_ranks_that_did_not_start_avoid_long_tasks():
    scheduler = Scheduler({}, {})
    (task,) = ranks(1)
    task.dependencies = {Block(scheduler.workers["a"])}
    scheduler.workers["a"].executes(Task("busy", is_rank=False), 5.0)
    assert is_full(scheduler.workers["a"], task)
    assert placed(scheduler, task) == ["a"], "it may end soon"
    unstarted.add(task)
    task.processing_on = None
    assert placed(scheduler, task) == ["b"]
