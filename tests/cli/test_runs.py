from __future__ import annotations

from types import SimpleNamespace

import dask.array as da
import pytest
from click.testing import CliRunner
from distributed import Event, wait

import dask_p2p
from dask_p2p.cli import cluster as command
from dask_p2p.cli import p2p
from tests.support import BOUND_S, persisted, spread
from tests.transports.loopback import wait_until

pytestmark = pytest.mark.programs


@pytest.fixture
def printed(cluster):
    """Run the command, and return the cells of its lines by column."""

    def run(*args):
        result = CliRunner().invoke(p2p, ["runs", "--scheduler", cluster.scheduler_address, *args])
        assert result.exit_code == 0, result.output
        return result.stdout

    return run


def test_runs_are_those_of_the_page(client, printed):
    x = spread(client, da.ones((64, 64), chunks=(16, 64)))
    persisted(client, dask_p2p.rechunk(x, (64, 16)))
    persisted(client, dask_p2p.iterate(lambda u: u[1:-1], x, {0: 1}, 12, boundary=0.0, ranks=2))
    lines = printed("--count", "2").splitlines()
    head, section, rechunk = lines
    assert head.split()[:4] == ["start", "operation", "shape", "dtype"]
    assert "fallbacks" not in head, "no run has any"
    assert "p2p-iterate" in section
    assert "12 of 12" in section
    assert "p2p-rechunk" in rechunk
    assert "4 of 1 x 4" in rechunk
    assert "done" in rechunk


def wait_for_event(block):
    Event("runs").wait(BOUND_S)
    return block


def test_a_table_is_printed_again_until_ctrl_c(client, printed, monkeypatch):
    x = spread(client, da.ones((64, 64), chunks=(16, 64)))
    event = Event("runs", client=client)
    y = dask_p2p.map_overlap(wait_for_event, x, {0: 1}, "periodic", dtype=float).persist()
    pauses_s = []

    def finish_then_stop(seconds):
        pauses_s.append(seconds)
        if len(pauses_s) == 2:
            raise KeyboardInterrupt
        event.set()
        wait(y)

    monkeypatch.setattr(command, "time", SimpleNamespace(sleep=finish_then_stop))
    wait_until(lambda: any(run.under_way for run in dask_p2p.last_runs(client, 1)))
    _, before, _, after = printed("--count", "1", "--watch", "0.5").splitlines()
    assert "0 of 4 x 1" in before
    assert "%" in before
    assert "4 of 4 x 1" in after
    assert "done" in after
    assert pauses_s == [0.5, 0.5]


def test_no_scheduler_and_no_address():
    result = CliRunner().invoke(p2p, ["runs", "--scheduler", "no address"])
    assert (result.exit_code, result.stdout) == (1, "")
    assert "no scheduler answers at no address" in result.stderr
    assert CliRunner().invoke(p2p, ["runs"]).exit_code == 2
