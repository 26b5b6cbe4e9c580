"""Reports of ranks that wait for each other."""

from __future__ import annotations

import os
import time
from logging.handlers import BufferingHandler

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import Client

from dask_p2p import spmd, stalled
from dask_p2p.errors import InputError
from dask_p2p.sections.wire import point_to_point as waits
from tests.transports.loopback import wait_until

CLUSTER = {"n_workers": 2, "threads_per_worker": 2}
X = np.arange(12.0)


def held_up(folder):
    """Rank 1 loops until a file is there."""
    while not os.path.exists(folder / "go"):
        time.sleep(0.01)


def function(ctx, x, folder):
    for step in ctx.steps(20):
        if ctx.rank == 1 and step == 4:
            held_up(folder)
        x = x + ctx.allreduce(x.sum())
    return x


def test_the_stacks_of_a_section_that_stalls(client, tmp_path):
    """Each wait is logged once, too."""
    assert stalled(client, after=0) == []
    client.run(_listen)
    x = da.from_array(X, chunks=4)
    with dask.config.set({"p2p.timeouts.request": "200 ms"}):
        future = client.compute(spmd(function, x, ranks=3, folder=tmp_path))
    reports = wait_until(lambda: found_stalled(client))
    assert stalled(client, after="1 hour") == []
    assert {report.size for report in reports.values()} == {3}
    assert {(report.step, report.steps) for report in reports.values()} == {(4, 20)}
    assert reports[1].waits_for == ()
    assert "computes" in str(reports[1])
    waiting = reports[0], reports[2]
    assert all("allreduce" in report.call and report.exchanges > 4 for report in waiting)
    assert all(
        "waits for rank " in str(report) and 'allreduce("sum")' in str(report) for report in waiting
    )
    assert {report.worker for report in reports.values()} == {*client.scheduler_info()["workers"]}
    wait_until(lambda: {line[:11] for line in logged(client)} >= {"Rank 0 of 3", "Rank 2 of 3"})
    before = len(logged(client))
    time.sleep(0.5)  # the ranks look for messages many times
    assert len(logged(client)) <= before + 2, "both have logged the last wait"
    (tmp_path / "go").touch()
    future.result()
    wait_until(lambda: stalled(client, after=0) == [])
    assert all("dask_p2p.stalled(client)" in line for line in logged(client))


def logged(client):
    return [line for lines in client.run(_lines).values() for line in lines]


def found_stalled(client):
    """Return the reports by rank once two ranks have waited for the third one, which is held up.

    On a busy machine ranks wait for others in earlier steps, too.
    """
    reports = {report.rank: report for report in stalled(client, after="100 ms")}
    waiting = [report for rank, report in reports.items() if rank != 1]
    if all(report.waits_for == (1,) and report.waited_s > 0.1 for report in waiting):
        return reports if 1 in reports and "held_up" in reports[1].stack else {}
    return {}


def _listen():
    waits.logger.addHandler(_LOG)


def _lines():
    lines = [record.getMessage() for record in _LOG.buffer]
    return [line for line in lines if "has waited" in line and "for ranks [1]" in line]


_LOG = BufferingHandler(10_000)


def test_wrong_arguments_are_refused(client):
    with pytest.raises(InputError, match="after: expected a time like '10 s', got 'soon'"):
        stalled(client, after="soon")


async def test_an_asynchronous_client_is_refused(cluster):
    async with Client(cluster.scheduler_address, asynchronous=True) as client:
        with pytest.raises(InputError, match="synchronous client"):
            stalled(client)
