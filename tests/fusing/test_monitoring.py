"""Fused graphs and resident gangs in `last_runs` and on the page /p2p."""

import dask
import pytest
from distributed import Event, wait

import dask_p2p
from dask_p2p.monitoring.charts import Speeds, section_of, speed_chart, waiting_chart
from dask_p2p.monitoring.runs import cells
from tests.fusing.programs import array, stencils
from tests.transports.loopback import wait_until

CLUSTER = {"n_workers": 2, "threads_per_worker": 1}


def after_gate(block):
    """Return a block once the test permits it."""
    Event("gate-of-fused").wait(200)
    return block


def newest(operation="p2p-fused"):
    return next((run for run in dask_p2p.last_runs() if run.operation == operation), None)


def ranks_have_begun():
    """Return whether both ranks have reported steps."""
    run = newest()
    return run is not None and run.under_way and len(run.records) == 2 and run.steps


@pytest.mark.parametrize("mode", ["fused", "option", "compiled"])
def test_a_fused_graph_that_runs_and_has_run(client, mode):
    gate = Event("gate-of-fused", client=client)
    gate.clear()

    def program(u):
        u = stencils(u)
        return stencils(u.map_blocks(after_gate, meta=u._meta))

    x = array()
    y = dask_p2p.compile(program, x)(x) if mode == "compiled" else program(x)
    y = dask_p2p.fused(y) if mode == "fused" else y
    with dask.config.set({"p2p.fuse": "on" if mode == "option" else "off"}):
        persisted = client.persist(y)
    try:
        wait_until(ranks_have_begun)
        run = newest()
        assert 0 < run.steps < run.all_steps
        assert section_of(dask_p2p.last_runs()) is not None
        title = speed_chart(run, Speeds()).title
        assert title.startswith(f"p2p-fused: {run.steps} of {run.all_steps} steps")
        assert len(waiting_chart(run).columns["rank"]) == 2
    finally:
        gate.set()
    wait(persisted)
    wait_until(lambda: not newest().under_way)
    run = newest()
    assert run.steps == run.all_steps >= 12
    assert (run.state, run.shape, run.dtype) == ("done", x.shape, str(x.dtype))
    assert cells(run)["steps"].startswith(f"{run.steps} of {run.steps}")
    assert 0 <= run.waited_share <= 1
    del persisted
