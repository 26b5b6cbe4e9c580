"""The bars of Dask's own `progress`, with steps of running gangs."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import dask.array as da
import numpy as np
import pytest
from distributed import Event, worker_client
from distributed.diagnostics.progress import MultiProgress, Progress
from distributed.diagnostics.progressbar import MultiProgressBar, TextProgressBar

from dask_p2p import iterate
from dask_p2p.plugins.gangs.bars import MARKS, Bars
from dask_p2p.plugins.gangs.coordinator import Coordinator
from tests.clock import run_clocked
from tests.support import BOUND_S

GANG = "p2p-iterate-1"
KEYS = [(GANG, 0), (GANG, 1), (GANG, "commit")]


class Scheduler:
    """The plugins of Dask's scheduler."""

    def __init__(self):
        self.plugins = {}

    def remove_plugin(self, name):
        del self.plugins[name]


def bar_of(scheduler, kind, keys=KEYS):
    """A bar as it is after its set-up."""
    bar = kind([*keys], scheduler)
    bar.keys, bar.all_keys = {*keys}, {*keys}
    if kind is MultiProgress:
        bar.func = lambda key: key[0][:11]
        bar.keys, bar.all_keys = {"p2p-iterate": {*keys}}, {"p2p-iterate": {*keys}}
    scheduler.plugins[bar.name] = bar
    return bar


def counts(bar):
    """Return the numbers of unfinished keys and of all keys."""
    if isinstance(bar, MultiProgress):
        return sum(map(len, bar.keys.values())), sum(map(len, bar.all_keys.values()))
    return len(bar.keys), len(bar.all_keys)


def gang(coordinator):
    for rank in range(2):
        coordinator.join(GANG, 2, rank, f"t{rank}", f"w{rank}", "e")


def run(kind, program, steps=200):
    """Run a program with a gang, its bar, and the steps of its two ranks."""

    async def main():
        scheduler, coordinator, at = Scheduler(), Coordinator(1), {"w0": 0, "w1": 0}

        async def under_way(worker):
            rank = int(worker[1])
            return [SimpleNamespace(key=(GANG, rank), step=at[worker], steps=steps)]

        bars = Bars(scheduler, coordinator, under_way)
        bar = bar_of(scheduler, kind)
        other = bar_of(scheduler, Progress, ["another"])
        bars.watch()  # nothing runs
        gang(coordinator)
        bars.watch()
        await asyncio.sleep(0.1)
        await program(bars, coordinator, bar, at)
        assert counts(other) == (1, 1)
        bars.close()

    run_clocked(main())


@pytest.mark.parametrize("kind", [Progress, MultiProgress])
def test_marks_finish_with_the_steps_of_the_slowest_rank(kind):
    async def program(bars, coordinator, bar, at):
        assert counts(bar) == (3 + MARKS, 3 + MARKS)
        at.update(w0=100, w1=50)
        await asyncio.sleep(1)
        assert counts(bar) == (3 + MARKS * 3 // 4, 3 + MARKS)
        at.update(w0=20, w1=20)  # another attempt
        await asyncio.sleep(1)
        assert counts(bar) == (3 + MARKS * 9 // 10, 3 + MARKS)
        bars.finish(GANG)
        assert counts(bar) == (3, 3 + MARKS)

    run(kind, program)


@pytest.mark.parametrize("kind", [Progress, MultiProgress])
def test_a_bar_never_waits_for_marks(kind):
    """Its tasks have finished before its marks do."""

    async def program(bars, coordinator, bar, at):
        for key in KEYS:
            bar.transition(key, "processing", "memory")
        assert (bar.status, counts(bar)[0]) == (None, MARKS)
        coordinator.forget(GANG)
        await asyncio.sleep(1)
        assert (bar.status, counts(bar)[0]) == ("finished", 0)

    run(kind, program)


def test_the_end_of_the_plugin_finishes_marks():
    async def program(bars, coordinator, bar, at):
        for key in KEYS:
            bar.transition(key, "processing", "memory")
        bars.close()
        assert bar.status == "finished"

    run(Progress, program)


def test_a_gang_without_a_number_of_steps_has_no_marks():
    async def program(bars, coordinator, bar, at):
        assert counts(bar) == (3, 3)

    run(Progress, program, steps=0)


def half_way(u, at, name):
    """A step that waits in the middle of the run until the test goes on."""
    if at.step == 100:
        with worker_client():
            assert Event(name).wait(BOUND_S)
    return u + 1


@pytest.mark.parametrize("kind", [TextProgressBar, MultiProgressBar])
def test_dasks_own_bar_moves_during_a_section(client, kind):
    seen, moved = [], threading.Event()

    class Bar(kind):
        def _draw_bar(self, remaining, all, **kwargs):  # noqa: A002
            if isinstance(all, dict):
                remaining, all = sum(remaining.values()), sum(all.values())  # noqa: A001
            seen.append(1 - remaining / all)
            if 0.4 < seen[-1] < 0.6:
                moved.set()

    name = f"go-on-{kind.__name__}"
    x = da.from_array(np.zeros((8, 4)), chunks=(4, 4))
    y = iterate(half_way, {"u": x}, 0, 200, ranks=2, name=name)["u"].persist()
    bar = Bar(client.futures_of(y), client.scheduler.address, start=False)
    listening = threading.Thread(target=lambda: asyncio.run(bar.listen()), daemon=True)
    listening.start()
    assert moved.wait(BOUND_S), seen
    assert not any(future.done() for future in client.futures_of(y))
    Event(name, client=client).set()
    listening.join(BOUND_S)
    assert not listening.is_alive()
    assert seen[-1] == 1
    np.testing.assert_array_equal(y.compute(), 200)
