"""The scheduler's side of gangs, with a stand-in for the scheduler."""

import asyncio
import re
from types import SimpleNamespace

import pytest
from distributed.core import Status

from dask_p2p.engine.task import PLUGIN_NAME
from dask_p2p.plugins.dask_internals import Units
from dask_p2p.plugins.gangs.gathering import describe_shortage
from dask_p2p.plugins.gangs.scheduler import FORGET, Gangs
from tests.sections.schedulers import Scheduler, ranks
from tests.sections.support import coordinator_of

GOOD = {"gang": "x", "rank": 0, "token": "t0"}
JOINING = {**GOOD, "size": 2, "worker": "a", "endpoint": "of a", "saved": []}


class GangScheduler:
    """Has the ranks of one gang in process on a worker each."""

    def __init__(self, **workers):
        self.handlers, self.workers, self.plugins = {}, {"a", "b"}, {}
        self.released, self.forgotten = [], []
        self.tasks = {("x", rank): self.task(worker) for rank, worker in enumerate("ab")}
        self.tasks["x", "commit"] = self.task(None, "waiting")
        self.handlers["adaptive_target"] = lambda target_duration=None: 3

    def task(self, worker, state="processing"):
        on = SimpleNamespace(address=worker)
        fields = {"exception_text": "", "suspicious": 0, "resource_restrictions": None}
        return SimpleNamespace(state=state, processing_on=on, **fields)

    def rpc(self, worker):
        async def forget(gang):
            self.forgotten.append((worker, gang))
            raise OSError("it has gone")

        return SimpleNamespace(**{FORGET: forget})

    def transitions(self, recommendations, stimulus_id):
        self.released += recommendations


def started():
    """Return a scheduler, and its gangs on the loop that runs; the plugin of gangs is on."""
    scheduler = GangScheduler()
    scheduler.plugins[PLUGIN_NAME] = plugin = object()

    def is_on():
        return scheduler.plugins.get(PLUGIN_NAME) is plugin

    def put_back():
        scheduler.plugins.setdefault(PLUGIN_NAME, plugin)

    return scheduler, Gangs(scheduler, is_on, put_back)


def join_all(gangs):
    return asyncio.gather(
        gangs.join(**JOINING),
        gangs.join(**JOINING | {"rank": 1, "token": "t1", "worker": "b", "endpoint": "of b"}),
    )


async def test_ranks_start_together_and_commit_together():
    _, gangs = started()
    orders = await join_all(gangs)
    assert {order["state"] for order in orders} == {"running"}
    assert orders[0]["peers"] == (("a", "t0", "of a"), ("b", "t1", "of b"))
    waiting = asyncio.ensure_future(gangs.order(**GOOD, known_state="running"))
    await gangs.leave(**GOOD)
    await asyncio.sleep(0)
    assert not waiting.done()
    await gangs.leave(gang="x", rank=1, token="t1")
    assert (await waiting)["state"] == "committed"


async def test_a_rank_joins_only_if_its_task_is_in_process_there():
    scheduler, gangs = started()
    assert (await gangs.join(**JOINING | {"worker": "b"}))["state"] == "stopped"
    del scheduler.tasks["x", 0]
    assert (await gangs.join(**JOINING))["state"] == "stopped"
    assert coordinator_of(gangs).size("x") is None


@pytest.mark.parametrize(("saved", "counted"), [([], 3), ([5], 3), ([5, 7], 0)])
async def test_deaths_before_a_newer_state_do_not_count(saved, counted):
    """An attempt began at step 5; the next one begins there too, or later."""
    scheduler, gangs = started()
    await whole_with(gangs, [5] if saved else [], "")
    gangs.transition(("x", 0), "processing", "released")
    for rank in range(2):
        scheduler.tasks["x", rank].suspicious = 3
    await whole_with(gangs, saved, "again")
    assert {scheduler.tasks["x", rank].suspicious for rank in range(2)} == {counted}


def whole_with(gangs, steps, token):
    """Both ranks join, and each has states of steps."""
    joining = [
        JOINING | {"rank": rank, "token": f"{token}{rank}", "worker": worker}
        for rank, worker in enumerate("ab")
    ]
    saved = [(rank, steps) for rank in range(2)]
    return asyncio.gather(
        *(gangs.join(**rank_arguments | {"saved": saved}) for rank_arguments in joining)
    )


async def test_an_output_that_comes_after_another_was_lost_is_released():
    scheduler, gangs = started()
    await join_all(gangs)
    await asyncio.gather(gangs.leave(**GOOD), gangs.leave(gang="x", rank=1, token="t1"))
    again = asyncio.ensure_future(gangs.join(**JOINING | {"token": "again"}))
    await asyncio.sleep(0.01)
    assert scheduler.released == []
    scheduler.tasks["x", 1].state = "memory"
    gangs.transition(("x", 1), "processing", "memory")
    await asyncio.sleep(0.01)
    again.cancel()
    assert set(scheduler.released) == {("x", 1)}


@pytest.mark.parametrize("end", ["commit", "error", "error before", "cancel", "cancelled before"])
async def test_workers_forget_states_with_the_gang(end):
    scheduler, gangs = started()
    saving = [{**GOOD, "worker": "a"}, {**GOOD, "worker": "b"}, {**GOOD, "worker": "gone"}]
    if end != "cancelled before":
        await join_all(gangs)
    if end == "error before":
        scheduler.tasks["x", 0].state = "erred"
    for request in saving:
        assert await gangs.saves(**request) == {"status": "ok"}
    await gangs.leave(**GOOD)
    await asyncio.sleep(0)
    if end == "commit":
        assert scheduler.forgotten == []
        await gangs.leave(gang="x", rank=1, token="t1")
    elif end == "error":  # its task stays as long as a client has its future
        gangs.transition(("x", 0), "processing", "erred")
    elif end == "cancel":
        for rank in range(2):
            gangs.transition(("x", rank), "released", "forgotten")
            del scheduler.tasks["x", rank]
    await asyncio.sleep(0.01)
    assert sorted(scheduler.forgotten) == [("a", "x"), ("b", "x")]
    assert not gangs._keepers
    assert not gangs._background._running


@pytest.mark.parametrize("is_removed", ["off", "by another"])
async def test_ranks_come_again_after_the_plugin_was_taken_off(monkeypatch, is_removed):
    """It received no events of their tasks before it was added again."""
    monkeypatch.setattr("dask_p2p.plugins.gangs.scheduler._POLL_S", 0.1)
    scheduler, gangs = started()
    await join_all(gangs)
    await gangs.saves(**GOOD, worker="a")
    waiting = asyncio.ensure_future(gangs.order(**GOOD, known_state="running"))
    await asyncio.sleep(0)
    plugin = scheduler.plugins[PLUGIN_NAME]
    scheduler.plugins[PLUGIN_NAME] = new_plugin = object()
    if is_removed == "off":
        scheduler.plugins.clear()
    assert (await waiting)["state"] == "stopped"
    await gangs.leave(**GOOD)
    await gangs.leave(gang="x", rank=1, token="t1")
    assert not coordinator_of(gangs).is_committed("x")
    assert scheduler.forgotten == [("a", "x")]
    assert scheduler.plugins == {PLUGIN_NAME: new_plugin if is_removed == "by another" else plugin}


async def test_outputs_of_an_unknown_gang_are_released():
    """The plugin was taken off after it had committed; then another output was lost."""
    scheduler, gangs = started()
    scheduler.tasks["x", 1].state = "memory"
    again = asyncio.ensure_future(gangs.join(**JOINING))
    await asyncio.sleep(0.01)
    again.cancel()
    assert scheduler.released == [("x", 1)]


async def test_a_gang_is_forgotten_with_its_last_task():
    scheduler, gangs = started()
    await join_all(gangs)
    for rank in range(2):
        assert coordinator_of(gangs).size("x") == 2
        gangs.transition(("x", rank), "released", "forgotten")
        del scheduler.tasks["x", rank]
    assert coordinator_of(gangs).size("x") is None


async def test_an_adaptive_cluster_is_told_its_target():
    scheduler, gangs = started()
    assert scheduler.handlers["adaptive_target"](target_duration="1 s") == 3
    assert gangs._gathering._asked_s > 0


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


GPU = {"GPU": 1}


@pytest.mark.parametrize(
    ("resources", "tasks"),
    [
        ([{}, {}], ranks(9, workers={"a"})),
        ([{}, {}], ranks(9, hosts={"host-b"})),
        ([{"GPU": 3}, {}], ranks(3, GPU)),
        ([{"GPU": 1}], ranks(10, {"GPU": 0.1})),
        ([GPU, GPU, GPU], [*ranks(2, GPU, workers={"a", "b"}), *ranks(1, GPU)]),
        ([GPU, {"TPU": 1}], [*ranks(1, GPU), *ranks(1, {"TPU": 1}), *ranks(3)]),
        ([GPU, GPU], ranks(2, GPU, workers={"gone"}, loose=True)),
    ],
)
def test_gangs_that_can_run(resources, tasks):
    assert describe_shortage(Scheduler(*resources), "x", tasks) == ""


@pytest.mark.parametrize(
    ("resources", "tasks", "text"),
    [
        (
            [GPU, GPU, {}],
            ranks(3, GPU),
            "x has 3 ranks, which run at the same time. 3 of them need 1 unit of resource 'GPU' "
            "each, and the workers have 2 units in all, enough for 2 ranks. Give ranks=2, or "
            "start workers with more units of 'GPU' and wait for them",
        ),
        ([{}, {}], ranks(2, GPU), "have 0 units in all, too few for any rank. Start workers"),
        (
            [{"GPU": 1, "m": 9}, {"GPU": 1}],
            ranks(2, {"GPU": 1, "m": 5}),
            "5 units of resource 'm' .* 9 units in all, enough for 1 rank. Give ranks=1",
        ),
        (
            [GPU, GPU],
            ranks(2, GPU, workers={"a"}),
            r"the workers that may run them \(a\) have 1 unit in all, enough for 1 rank",
        ),
        ([GPU, {}], ranks(2, GPU, workers={"b"}), r"\(b\) have 0 units in all"),
        ([GPU, {}], ranks(2, GPU, hosts={"host-a"}), r"\(host-a\) have 1 unit in all"),
        (
            [{}, {}],
            ranks(2, workers={"tcp://gone:1"}),
            r"2 of them are restricted to workers that the cluster does not have \(tcp://gone:1\). "
            "Name workers of the cluster by workers=, or give allow_other_workers=True",
        ),
        ([GPU], [*ranks(1), *ranks(1, workers={"gone"})], "1 of them are restricted to workers"),
        ([GPU], ranks(2, {"TPU": 1}, workers={"gone"}, loose=True), "resource 'TPU'"),
        ([GPU], [*ranks(3), *ranks(2, GPU)], "has 5 ranks.* 2 of them need 1 unit"),
    ],
)
def test_what_is_lacking_is_named(resources, tasks, text):
    assert re.search(text, describe_shortage(Scheduler(*resources), "x", tasks))


def test_many_ranks_are_looked_at_quickly():
    """Each restriction is checked once, for any number of ranks."""
    scheduler = Scheduler(*[GPU] * 8)
    scheduler.coerce_hostname = lambda host: requests.append(host) or host
    requests = []
    assert "enough for 8 ranks" in describe_shortage(scheduler, "x", ranks(5000, GPU))
    assert describe_shortage(scheduler, "x", ranks(5000, hosts={"host-a"})) == ""
    assert requests == ["host-a"]
