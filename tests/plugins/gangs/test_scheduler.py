"""The scheduler's side of gangs, with a stand-in for the scheduler."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from dask_p2p.engine.task import PLUGIN_NAME
from dask_p2p.plugins.gangs.scheduler import FORGET, Gangs
from tests.sections.support import coordinator_of

GOOD = {"gang": "x", "rank": 0, "token": "t0"}
JOINING = {**GOOD, "size": 2, "worker": "a", "endpoint": "of a", "saved": []}


class Scheduler:
    """Has the ranks of one gang in process on a worker each."""

    def __init__(self, **workers):
        self.handlers, self.workers, self.plugins = {}, {"a", "b"}, {}
        self.released, self.forgotten = [], []
        self.tasks = {("x", rank): self.task(worker) for rank, worker in enumerate("ab")}
        self.tasks["x", "commit"] = self.task(None, "waiting")
        self.handlers["adaptive_target"] = lambda target_duration=None: 3

    def task(self, worker, state="processing"):
        on = SimpleNamespace(address=worker)
        return SimpleNamespace(
            state=state,
            processing_on=on,
            exception_text="",
            suspicious=0,
            resource_restrictions=None,
        )

    def rpc(self, worker):
        async def forget(gang):
            self.forgotten.append((worker, gang))
            raise OSError("it has gone")

        return SimpleNamespace(**{FORGET: forget})

    def transitions(self, recommendations, stimulus_id):
        self.released += recommendations


def started():
    """Return a scheduler, and its gangs on the loop that runs; the plugin of gangs is on."""
    scheduler = Scheduler()
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
