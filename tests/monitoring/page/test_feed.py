"""The data of a page: workers are asked for it only while a page is open."""

import asyncio

import pytest

from dask_p2p.monitoring import feed as module
from dask_p2p.monitoring.feed import INTERVAL_S, Feed, Tasks, picture
from dask_p2p.monitoring.records import RecordStore, Stage
from dask_p2p.monitoring.runs import cells, runs_of
from tests.clock import clocked
from tests.monitoring.support import NAME, record

FROM_B = (Stage("b", "cma", 100),)


def now_s():
    return asyncio.get_running_loop().time()


class Workers:
    """Workers that count questions; their tasks end one with each."""

    def __init__(self, *names):
        self.store = RecordStore()
        self.request_counts = dict.fromkeys(names, 0)
        self.tasks = Tasks()
        self.under_way = []
        self.feed = Feed(
            self.store, lambda: [*self.request_counts], self.ask, lambda _: self.tasks, now_s
        )

    async def ask(self, worker):
        number = self.request_counts[worker]
        self.request_counts[worker] += 1
        if worker == "still":
            await asyncio.Event().wait()
        if worker == "broken":
            raise RuntimeError("on purpose")
        if number < 3:
            self.store.add(worker, number, [record(number, number, worker=worker)])
        return self.under_way

    async def poll(self, times):
        """Look as a page does, more often than workers are to be asked."""
        for _ in range(times):
            self.feed.refresh()
            await asyncio.sleep(INTERVAL_S / 5)


@clocked
async def test_workers_are_asked_only_while_a_page_is_open():
    workers = Workers("a")
    workers.feed.picture()
    await asyncio.sleep(5 * INTERVAL_S)
    assert workers.request_counts == {"a": 0}
    await workers.poll(1)
    await asyncio.sleep(5 * INTERVAL_S)
    assert workers.request_counts == {"a": 1}


@clocked
async def test_large_clusters_are_asked_less_often(monkeypatch):
    monkeypatch.setattr("dask_p2p.monitoring.feed.INTERVAL_S_PER_WORKER", 1.0)
    workers = Workers(*map(str, range(100)))
    await workers.poll(20)
    assert set(workers.request_counts.values()) == {1}
    workers.feed.close()


@clocked
async def test_one_that_stands_still_does_not_keep_the_others():
    workers = Workers("a", "still", "broken")
    while workers.request_counts["a"] < 5:
        await workers.poll(1)
    assert workers.request_counts["still"] == 1, "it owes an answer"
    assert workers.request_counts["broken"] >= 4
    assert workers.feed.picture().runs["blocks"] == ["3 of 2 x 1"]
    workers.feed.forget("still")
    del workers.request_counts["still"]
    workers.feed.close()


@clocked
async def test_tasks_under_way_are_shown_until_they_have_ended():
    workers = Workers("a")
    workers.request_counts["a"] = 3  # no records of its own

    async def running(times=20):
        await workers.poll(times)
        return workers.feed.picture().running

    workers.under_way = [record(0, wanted_bytes=10)]
    assert workers.feed.picture().running == frozenset(), "no page is open"
    assert await running() == {NAME}
    workers.tasks, workers.under_way = Tasks(total=2, left=1), []
    workers.store.add("a", 0, [record(0)])
    assert await running() == {NAME}, "a second task is to come"
    workers.tasks = Tasks(total=2)
    assert await running() == frozenset()
    workers.under_way = [record(1, wanted_bytes=10)]
    assert await running() == {NAME}
    del workers.request_counts["a"]
    workers.feed.forget("a")
    assert workers.feed.picture().running == frozenset(), "its worker has left"


@clocked
async def test_tasks_under_way_are_dropped_while_no_page_is_open():
    workers = Workers("a")
    workers.request_counts["a"] = 3
    workers.under_way = [record(0, wanted_bytes=10)]
    await workers.poll(2)
    assert workers.feed.picture().running == {NAME}
    await asyncio.sleep(module._FORGET_S + 1)
    assert workers.feed.refresh().running == frozenset()
    workers.feed.close()


def table(records, **tasks):
    columns = picture(records, tasks={NAME: Tasks(**tasks)} if tasks else {}).runs
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def test_the_figures_are_those_of_the_runs():
    records = [record(0, 1.0, FROM_B, dtype="f4"), record(1, 1.5, FROM_B, wasted_bytes=7)]
    (row,) = table(records)
    (run,) = runs_of(records)
    assert {name: row[name] for name in cells(run)} == cells(run) | {"state": "done"}
    assert (row["name"], row["state"], row["progress"]) == (NAME, "done", 1.0)
    assert (row["moved"], row["least"], row["wall"]) == ("207 B", "200 B", "1.50 s")


def test_progress_goes_by_bytes():
    half = record(1, 1.0, (Stage("b", "cma", 50),), wanted_bytes=100)
    (row,) = table([record(0, 0.0, FROM_B), half], total=4, left=3)
    assert (row["state"], row["progress"]) == ("running", pytest.approx(1.5 / 4))
    assert (row["moved"], row["least"], row["blocks"]) == ("150 B", "100 B", "1 of 2 x 1")
    (row,) = table([half])  # the scheduler has no such task
    assert (row["state"], row["progress"]) == ("running", 0.5)


def test_progress_where_nothing_has_to_come():
    (row,) = table([record(0), record(1, wanted_bytes=0)], total=4, left=3)
    assert (row["state"], row["progress"]) == ("running", 0.25)


def rank_record(rank, step=0, wanted_bytes=0, steps=5000):
    """A record of one of two ranks of a section, whose commit task the scheduler has too."""
    return record(rank, 1.0, wanted_bytes=wanted_bytes, step=step, steps=steps, attempt=1)


@pytest.mark.parametrize(
    ("records", "unfinished", "progress"),
    [
        ([rank_record(0, 495), rank_record(1, 495)], 3, 0.099),
        ([rank_record(0, 3459), rank_record(1, 3459)], 3, 3459 / 5000),
        ([rank_record(0, 5000), rank_record(1, 5000)], 3, 1.0),
        ([rank_record(0, 2500)], 3, 0.25),  # no record of the other one has come
        ([rank_record(0, 5000, None), rank_record(1, 2500)], 2, 0.75),
        ([rank_record(0, steps=0), rank_record(1, steps=0)], 3, 0.0),
        ([rank_record(0, 5000, None), rank_record(1, 5000, None)], 1, 1.0),
    ],
)
def test_progress_of_a_section_is_that_of_its_steps(records, unfinished, progress):
    (row,) = table(records, total=3, left=unfinished)
    assert (row["state"], row["progress"]) == ("running", pytest.approx(progress))


def test_the_run_before_stays_done():
    before = [record(0, 0.0, FROM_B), record(1, 0.0, FROM_B)]
    (row,) = table(before, total=2, left=2)
    assert row["state"] == "done"
    now = record(0, 5.0, FROM_B, wanted_bytes=400, run=1)
    newer, older = table([*before, now], total=2, left=2)
    assert (newer["state"], newer["progress"]) == ("running", pytest.approx(0.25 / 2))
    assert older["state"] == "done"
    newer, older = table([before[0], now], total=2, left=2)  # which was a part of it
    assert (newer["state"], older["state"]) == ("running", "done")


def test_final_failures_are_shown():
    (row,) = table([record(0, error="why"), record(1)])
    assert row["state"] == "failed"
    (row,) = table([record(0, error="why"), record(0, 2.0)])
    assert row["state"] == "done"
    (row,) = table([record(0, error="ended", outcome="cancelled")])
    assert row["state"] == "cancelled"


def test_a_run_that_may_be_incomplete_is_left_out():
    records = [record(0, 0.0, name="old"), record(0, 5.0, name="new")]
    assert picture(records).runs["name"] == ["new", "old"]
    assert picture(records, is_cut=True).runs["name"] == ["new"]
    assert picture(records[:1], is_cut=True).runs["name"] == ["old"]
