"""Workers are asked while somebody looks, and only then."""

from __future__ import annotations

import asyncio

import pytest

from dask_p2p.monitoring import feed as module
from dask_p2p.monitoring.feed import Feed
from dask_p2p.monitoring.picture import Tasks
from dask_p2p.monitoring.records import RecordStore, Stage, packed, unpacked
from tests.monitoring.support import NAME, OpenPage, record


class Workers:
    """Workers that count questions; their tasks end one with each."""

    def __init__(self, *names):
        self.store = RecordStore()
        self.asked = dict.fromkeys(names, 0)
        self.tasks = Tasks()
        self.feed = Feed(self.store, lambda: [*self.asked], self.ask, lambda name: self.tasks)

    async def ask(self, worker):
        number = self.asked[worker]
        self.asked[worker] += 1
        if worker == "still":
            await asyncio.Event().wait()
        if worker == "broken":
            raise RuntimeError("on purpose")
        if number < 3:
            self.store.add(worker, number, [record(number, number, worker=worker)])


@pytest.fixture(autouse=True)
def _in_haste(monkeypatch):
    monkeypatch.setattr(module, "INTERVAL_S", 0.01)
    monkeypatch.setattr(module, "_PATIENCE_S", 0.01)


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


def run(main):
    """Run it, and see that it leaves nothing behind."""

    async def whole():
        await main()
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(whole())


def test_nobody_is_asked_without_a_page():
    async def main():
        workers = Workers("a")
        await asyncio.sleep(0.05)
        assert workers.asked == {"a": 0}
        assert not workers.feed.is_running

    run(main)


def test_pages_share_what_is_asked():
    async def main():
        workers, pages = Workers("a"), [OpenPage(), OpenPage()]
        for page in pages:
            workers.feed.watch(page)
        await until(lambda: workers.asked["a"] >= 5)
        assert all(len(page.shown) <= workers.asked["a"] for page in pages)
        assert pages[0].shown[-1] is pages[1].shown[-1]
        assert pages[0].shown[-1].runs["made"] == [3]
        assert pages[0].shown[-1] is pages[0].shown[-2], "nothing was new"
        workers.feed.unwatch(pages[0])
        assert workers.feed.is_running
        workers.feed.unwatch(pages[1])
        assert not workers.feed.is_running
        asked = workers.asked["a"]
        await asyncio.sleep(0.05)
        assert workers.asked["a"] == asked

    run(main)


def test_a_page_that_nobody_sees_asks_nobody():
    async def main():
        workers, page = Workers("a"), OpenPage(is_open=False)
        workers.feed.watch(page)
        await asyncio.sleep(0.05)
        assert workers.asked == {"a": 0}
        page.is_open = True
        await until(lambda: page.shown)
        workers.feed.close()

    run(main)


def test_looking_again_after_the_last_page_has_closed():
    async def main():
        workers, page = Workers("a"), OpenPage()
        workers.feed.watch(page)
        workers.feed.unwatch(page)
        workers.feed.watch(page)
        await until(lambda: page.shown)
        workers.feed.close()

    run(main)


def test_one_that_stands_still_does_not_keep_the_others():
    async def main():
        workers, page = Workers("a", "still", "broken"), OpenPage()
        workers.feed.watch(page)
        await until(lambda: workers.asked["a"] >= 5)
        assert workers.asked["still"] == 1, "it owes an answer"
        assert workers.asked["broken"] >= 4
        assert page.shown[-1].runs["made"] == [3]
        workers.feed.forget("still")
        del workers.asked["still"]
        workers.feed.unwatch(page)

    run(main)


def test_tasks_under_way_are_shown_until_they_have_ended():
    async def main():
        workers, page = Workers(), OpenPage()
        workers.feed.tell("a", [record(0, wanted_bytes=10)])
        assert workers.feed.picture().running == frozenset(), "nobody looks"
        workers.feed.watch(page)
        workers.feed.tell("a", [record(0, wanted_bytes=10)])
        assert workers.feed.picture().running == {NAME}
        workers.tasks = Tasks(total=2, left=1)
        workers.feed.tell("a", [])
        workers.store.add("a", 0, [record(0)])
        assert workers.feed.picture().running == {NAME}, "a second task is to come"
        workers.tasks = Tasks(total=2)
        assert workers.feed.picture().running == frozenset()
        workers.feed.tell("a", [record(1, wanted_bytes=10)])
        workers.feed.forget("a")
        assert workers.feed.picture().running == frozenset(), "its worker has left"
        workers.feed.close()

    run(main)


def test_a_thousand_runs_leave_the_memory_flat():
    import tracemalloc

    stages = tuple(Stage(f"tcp://10.0.0.{h}:4000", "comm", 10**6, 0.1, 0.2) for h in range(3))

    def do(workers, runs):
        for run in runs:
            name = f"p2p-transpose-{run:032}"
            log = [record(i, 99.0 * run + i, stages, name=name, blocks=(16, 1)) for i in range(16)]
            workers.store.add("a", 16 * run, unpacked(packed(log)))
            if run % 20 == 0:
                workers.feed.picture()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        workers = Workers("a")
        workers.store._size = 1000
        some = do(workers, range(100))
        # Caches keep the runs' names, up to a number. The records alone would take six times this.
        assert do(workers, range(100, 1000)) < some + 1e6
    finally:
        tracemalloc.stop()


def test_a_picture_is_made_once():
    workers = Workers("a")
    first = workers.feed.picture()
    assert workers.feed.picture() is first
    workers.store.add("a", 0, [record(0)])
    assert workers.feed.picture() is not first
    assert workers.feed.picture() is workers.feed.picture()
