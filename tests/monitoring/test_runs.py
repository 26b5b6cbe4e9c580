"""The begin and end of a run: the scheduler's pending tasks decide, not the time."""

from __future__ import annotations

import os
import signal
import time

import dask.array as da
import numpy as np
from distributed import Event, wait

import dask_p2p
from dask_p2p.monitoring.records import RunLog
from dask_p2p.plugins.registration import workers_of
from tests.monitoring.support import NAME, record
from tests.support import BOUND_S, import_path, indexed, own_client, spread
from tests.transports.loopback import wait_until

X = indexed((64, 64), float)


def runs_of_array(client, y):
    return [run for run in dask_p2p.last_runs(client) if run.name == y.name]


def block(client, y, row):
    return client.get(y.__dask_graph__(), (y.name, row, 0), sync=False)


def test_what_is_missing_of_it_later(client):
    """A future holds one block of four; long after, the others are wanted."""
    y = dask_p2p.transpose(spread(client, da.from_array(X + 1, chunks=(16, 64))))
    held_block = block(client, y, 2)
    wait(held_block)
    time.sleep(0.3)
    np.testing.assert_array_equal(client.compute(y).result(), X.T + 1)
    new, old = runs_of_array(client, y)
    assert [r.key for r in old.made] == [(y.name, 2, 0)]
    assert {r.key for r in new.made} == {(y.name, row, 0) for row in (0, 1, 3)}
    assert new.start_s - old.stop_s > 0.3, "the time between the two belongs to no run"


def slow(x, event, block_id=None):
    if block_id[0] == 3:
        Event(event).wait(BOUND_S)
    return x


def half_stuck(client, event):
    """Two blocks: the first is made, the second waits for its input until the event is set."""
    x = da.from_array(X, chunks=(16, 64)).map_blocks(slow, event=event.name, dtype=float)
    y = client.persist(dask_p2p.rechunk(x, (32, 64)))
    wait_until(lambda: client.who_has(y)[y.name, 0, 0])
    return y


def test_a_pause_while_others_work_is_part_of_it(client):
    event = Event(client=client)
    y = half_stuck(client, event)
    (run,) = runs_of_array(client, y)
    assert len(run.made) == 1
    time.sleep(0.3)
    event.set()
    np.testing.assert_array_equal(client.compute(y).result(timeout=BOUND_S), X)
    (run,) = runs_of_array(client, y)
    assert (run.attempts, len(run.made)) == (2, 2)
    assert run.wall_s > 0.3


def test_what_a_killed_worker_had_made_is_made_again_in_the_same_run():
    with own_client(threads_per_worker=2, env={"PYTHONPATH": import_path()}) as client:
        event = Event()
        y = half_stuck(client, event)
        assert runs_of_array(client, y), "the scheduler has the record before the worker dies"
        (holder,) = client.who_has(y)[y.name, 0, 0]
        os.kill(client.run(os.getpid)[holder], signal.SIGKILL)
        wait_until(lambda: holder not in workers_of(client))
        wait_until(lambda: len(completed_records(client, y)) > 1)
        event.set()
        np.testing.assert_array_equal(client.compute(y).result(timeout=BOUND_S), X)
        (run,) = runs_of_array(client, y)
        assert [r.key[1] for r in completed_records(client, y)] == [0, 0, 1]
        assert sorted(r.key[1] for r in run.made) == [0, 1], "each once"
        head, row = repr(run).splitlines()
        assert head.startswith("operation")
        assert "2 of 2 x 1" in row


def completed_records(client, y):
    return [record for run in runs_of_array(client, y) for record in run.records if record.is_made]


def test_starts_are_bounded(monkeypatch):
    monkeypatch.setattr("dask_p2p.monitoring.records.MOST_ARRAYS", 3)
    monkeypatch.setattr("dask_p2p.monitoring.records.MOST_RUNS", 2)
    starts = RunLog()
    for number in range(1, 10):
        starts.sent(NAME, number)
        starts.end(NAME)
    numbered = starts.assigned(record(0, run=number) for number in (7, 8, 9))
    assert [r.run for r in numbered] == [0, 8, 9]
    for name in "abc":
        starts.sent(name, 20)
    numbered = starts.assigned(record(0, run=20, name=name) for name in (NAME, *"abc"))
    assert [r.run for r in numbered] == [0, 20, 20, 20]


def test_the_first_outcome_of_a_run_counts():
    """After a failure Dask releases the other tasks, as after a cancellation."""
    runs = RunLog()
    runs.sent(NAME, 1)
    for outcome in ("failed", "cancelled"):
        runs.set_outcome(NAME, outcome)
    assert runs.with_outcomes([record(0, run=1)])[0].outcome == "failed"
