from __future__ import annotations

import asyncio
import pickle
import threading
import warnings
from types import SimpleNamespace

import dask
import dask.array as da
import pytest

from dask_p2p import spmd
from dask_p2p.errors import P2PWarning
from dask_p2p.plugins.gangs.coordinator import COMMIT, Coordinator
from dask_p2p.plugins.gangs.gathering import Gathering
from tests.clock import run_clocked
from tests.support import BOUND_S, in_process
from tests.transports.loopback import true_later

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


class Scheduler:
    """The tasks of a gang, and the warnings that clients got."""

    def __init__(self, tasks):
        self.tasks = {("x", rank): rank_task for rank, rank_task in enumerate(tasks)}
        self.warnings = []

    def log_event(self, topic, event):
        assert topic == "warn"
        assert pickle.loads(event["category"]) is P2PWarning
        self.warnings.append(pickle.loads(event["message"]))


def gathering_of(scheduler, coordinator, after_s):
    """Return the object that checks the gang, by the time of the event loop."""
    gathering = Gathering(scheduler, coordinator, after_s, asyncio.get_running_loop().time)
    gathering.add([("x", COMMIT)])
    return gathering


def warnings_of(scheduler):
    """Let only the first rank join and wait; return the warnings for clients."""

    async def main():
        coordinator = Coordinator(8)
        gathering = gathering_of(scheduler, coordinator, AFTER_S)
        coordinator.join("x", len(scheduler.tasks), 0, "t0", "a")
        await asyncio.sleep(2 * AFTER_S)
        gathering.close()
        assert not asyncio.get_running_loop().has_timers()
        return scheduler.warnings

    return run_clocked(main())


def test_a_gang_of_the_same_name_has_not_waited_as_long():
    """Users compute the same graph repeatedly: one of these gangs may wait at any time."""
    scheduler = Scheduler([task("processing"), task("processing", worker())])

    async def main():
        coordinator = Coordinator(8)
        gathering = gathering_of(scheduler, coordinator, 10 * AFTER_S)
        for token in range(40):
            gathering.add([("x", COMMIT)])
            coordinator.join("x", 2, 0, str(token), "a")
            await asyncio.sleep(AFTER_S)
            coordinator.forget("x")
            gathering.forget(("x", COMMIT))

    run_clocked(main())
    assert not scheduler.warnings


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
    assert warnings_of(Scheduler([task("processing"), missing])) == [text]
    assert own_log.messages == [text]


def test_the_wait_for_inputs_is_only_logged(own_log):
    assert warnings_of(Scheduler([task("processing"), task("waiting", needs=["b", "a"])])) == []
    assert own_log.messages[0].endswith("task is waiting for 2 tasks, such as a.")


def test_the_first_ones_are_named():
    (text,) = warnings_of(Scheduler([task("processing"), *[task("queued")] * 6]))
    assert "rank 4" in text
    assert "rank 5" not in text
    assert text.endswith("; and 2 more.")


def test_the_warning_is_repeated_until_the_gang_begins(monkeypatch):
    monkeypatch.setattr("dask_p2p.plugins.gangs.gathering.REMINDER_S", AFTER_S)
    scheduler = Scheduler([task("processing"), task("queued")])

    async def main():
        coordinator = Coordinator(8)
        gathering = gathering_of(scheduler, coordinator, AFTER_S)
        coordinator.join("x", 2, 0, "t0", "a")
        while len(scheduler.warnings) < 3:
            await asyncio.sleep(AFTER_S)
        coordinator.join("x", 2, 1, "t1", "b")
        count = len(scheduler.warnings)
        await asyncio.sleep(5 * AFTER_S)
        assert len(scheduler.warnings) == count
        gathering.close()

    run_clocked(main())


def test_a_gang_that_runs_in_time_causes_no_warning():
    scheduler = Scheduler([task("processing"), task("queued")])

    async def main():
        coordinator = Coordinator(8)
        gathering = gathering_of(scheduler, coordinator, 10 * AFTER_S)
        coordinator.join("x", 2, 0, "t0", "a")
        await asyncio.sleep(7 * AFTER_S)
        coordinator.join("x", 2, 1, "t1", "b")
        coordinator.drop("x", 0, "taken back")  # it has waited, but not since it ran
        coordinator.join("x", 2, 0, "again", "a")
        await asyncio.sleep(7 * AFTER_S)
        assert scheduler.warnings == []
        await asyncio.sleep(7 * AFTER_S)
        assert len(scheduler.warnings) == 1
        gathering.close()

    run_clocked(main())


is_over = threading.Event()


def holding(ctx, x, number):
    is_over.wait(BOUND_S)
    return x + ctx.allreduce(1)


def test_clients_see_it_as_a_warning():
    """One of two gangs on a worker waits for the other."""

    def is_seen():
        return any("dask_p2p: p2p-spmd-ranks-" in str(warning.message) for warning in caught)

    async def main():
        x = da.ones((2, 2), chunks=(1, 2))
        async with in_process(1, threads_per_worker=4) as (_, client):
            futures = [client.compute(spmd(holding, x, ranks=2, number=n)) for n in range(2)]
            await true_later(is_seen)
            is_over.set()
            for future in futures:
                assert (await future == 3).all()

    with (
        dask.config.set({"p2p.sections.warn-after": "100 ms"}),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always", P2PWarning)
        asyncio.run(main())
