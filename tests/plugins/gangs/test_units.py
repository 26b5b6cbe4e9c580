from __future__ import annotations

from types import SimpleNamespace

from distributed.core import Status

from dask_p2p.plugins.dask_internals import Units


class Worker:
    """Has two units of a resource. A task has one. Callbacks run immediately, or later."""

    def __init__(self, needs):
        self.state = SimpleNamespace(
            tasks={"x": SimpleNamespace(resource_restrictions=needs)},
            available_resources={"GPU": 1.0},
        )
        self.loop = self

    def add_callback(self, callback, *args):
        callback(*args)

    @property
    def free(self):
        return self.state.available_resources["GPU"]


def test_units_are_lent_once_and_taken_back():
    worker = Worker({"GPU": 1})
    units = Units(worker, "x")
    units.lend()
    units.lend()
    assert worker.free == 2
    units.take(lambda: False)
    units.take(lambda: False)
    units.close()
    assert worker.free == 1


def test_units_that_others_have_are_waited_for():
    """And reserved immediately, so that no other task gets them first."""
    worker = Worker({"GPU": 1})
    units, waits = Units(worker, "x"), []
    units.lend()
    worker.state.available_resources["GPU"] -= 2  # by two tasks

    def wait():
        waits.append(worker.free)
        worker.state.available_resources["GPU"] += len(waits) > 1
        return True

    units.take(wait)
    assert waits == [-1, -1]
    assert worker.free == 0


def test_a_rank_that_is_stopped_waits_for_no_units():
    worker = Worker({"GPU": 1})
    units = Units(worker, "x")
    units.lend()
    worker.state.available_resources["GPU"] -= 2
    units.close()
    assert worker.free == -1, "Dask adds one when the task ends"


def test_tasks_start_that_wait_for_the_units_of_an_idle_rank():
    worker, events = Worker({"GPU": 1}), []
    worker.status, worker.handle_stimulus = Status.running, events.append
    units = Units(worker, "x")
    units.lend_while_idle()
    units.lend_while_idle()
    assert worker.free == 2
    assert len(events) == 1
    units.take(lambda: False)
    worker.status = Status.paused
    units.lend_while_idle()
    assert len(events) == 1
    without = Units(Worker({}), "x")
    without.lend_while_idle()
    assert not without._is_lent
