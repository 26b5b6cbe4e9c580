from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from dask_p2p.plugins.gangs.coordinator import COMMIT, Coordinator
from dask_p2p.plugins.gangs.gathering import Gathering
from tests.clock import run_clocked
from tests.sections.schedulers import Scheduler

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
