"""Records of ranks while they run, and after."""

import dask.array as da
import numpy as np
import pytest
from distributed import Event, wait

from dask_p2p import estimate, iterate, last_runs
from dask_p2p.engine.task import PLUGIN_NAME
from dask_p2p.monitoring.feed import TABLE
from tests.transports.loopback import wait_until

CLUSTER = {"n_workers": 2, "threads_per_worker": 2}


@pytest.fixture
def x():
    return da.ones((64, 8), chunks=(16, 8))


def gangs(y):
    return {key[0] for key in y.dask.to_dict() if "-ranks-" in str(key[0])}


def run_of_gang(client, y):
    """Compute an array, and return its run."""
    names = gangs(y)
    y = client.persist(y)
    wait(y)
    (run,) = (run for run in last_runs(client) if run.name in names)
    return run


def test_a_run_of_ranks(client, x):
    y = iterate(lambda u: (u[2:] + u[:-2]) / 2, x, {0: 1}, 50, ranks=2, checkpoint_every=None)
    run = run_of_gang(client, y)
    assert (run.operation, run.dtype) == ("p2p-iterate", "float64")
    assert (run.shape, run.blocks) == ((64, 8), (2, 1))
    assert (len(run.made), run.attempts, run.failures, run.steps) == (2, 2, (), 50)
    assert run.steps_per_s == min(50 / (r.stop_s - r.start_s) for r in run.records)
    assert run.moved_bytes == 2 * 50 * estimate(y).step_bytes
    assert run.transports == {"connection": len(run.pairs)}
    assert 0 < run.waited_share <= 1
    text = repr(last_runs(client, n=1))
    assert "50 of 50, " in text
    assert "waited" in text.splitlines()[0]
    (row,) = last_runs(client, n=1).to_pandas().to_dict("records")
    assert (row["steps"], row["waited_share"]) == (50, run.waited_share)


async def _look(dask_scheduler):
    """Return the newest row of the page's table, as a browser would get it."""
    feed = dask_scheduler.plugins[PLUGIN_NAME].feed
    feed.refresh()
    runs = feed.picture().runs
    row = {name: runs[name][0] for name in ("name", "state", *TABLE)} if runs["name"] else {}
    figures = dask_scheduler.plugins[PLUGIN_NAME].figures()
    return row | {"ranks": sum(figures["ranks"].values())}


def until(client, is_seen):
    rows = []

    def is_shown():
        rows[:] = [client.run_on_scheduler(_look)]
        return is_seen(*rows)

    wait_until(is_shown, state=lambda: rows)
    return rows[0]


def test_the_page_shows_how_far_ranks_are(client, x):
    def held(u, out):
        np.add(u[1:-1], 1, out=out)
        if out.flat[0] == 4:
            Event("go on").wait()

    y = iterate(held, x * 0, {0: 1}, 10, boundary=0.0, ranks=2)
    (name,) = gangs(y)
    y = client.persist(y)
    try:
        row = until(client, lambda row: row.get("name") == name and row["steps"] > "0 of")
        assert row["state"] == "running"
        until(client, lambda row: row["steps"].startswith("3 of 10, "))
        row = until(client, lambda row: row["progress"] >= 0.3)
        assert row["progress"] == pytest.approx(0.3), "of steps alone"
        assert row["blocks"] == "2 x 1 ranks"
        until(client, lambda row: row["ranks"] == 2)
    finally:
        Event("go on").set()
    wait(y)
    row = until(client, lambda row: row["state"] == "done" and row["ranks"] == 0)
    assert (row["progress"], row["blocks"]) == (1.0, "2 x 1 ranks")
    assert row["steps"].startswith("10 of 10, ")
