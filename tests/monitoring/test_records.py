"""Records and where they are kept, without a cluster."""

import os
import signal
import sys
import time
import tracemalloc

import dask.array as da
import numpy as np
import pytest
from distributed import Event, wait

import dask_p2p
from dask_p2p.errors import InputError, RegistrationError
from dask_p2p.monitoring import records
from dask_p2p.monitoring.metrics import COUNTERS, GAUGES, Counters, Totals
from dask_p2p.monitoring.records import (
    Fallback,
    RecordLog,
    RecordStore,
    RunLog,
    Stage,
    packed,
    unpacked,
)
from dask_p2p.monitoring.runs import Run, RunTable, cells, runs_of
from dask_p2p.plugins.registration import workers_of
from tests.monitoring.support import NAME, record
from tests.support import BOUND_S, import_path, indexed, own_client, spread
from tests.transports.loopback import wait_until


def test_a_log_is_bounded_in_records_and_their_stages():
    log = RecordLog(10)
    for i in range(100):
        log.append(record(i))
    assert [logged.key[1] for logged in log] == [*range(90, 100)]
    log.append(record(100, stages=(Stage("b", "comm", 1),) * 4))
    assert [logged.key[1] for logged in log] == [*range(95, 101)]
    log.append(record(101, stages=(Stage("b", "comm", 1),) * 100))
    assert len(log) == 1, "the newest one is there in any case"


def test_the_newest_of_a_log():
    log = RecordLog(100)
    assert log.newest(10) == []
    for i in range(5):
        log.append(record(i, stages=(Stage("b", "comm", 1),) * i))
    assert log.newest(4) == []
    assert log.newest(5) == [record(4, stages=(Stage("b", "comm", 1),) * 4)]
    assert [logged.key[1] for logged in log.newest(9)] == [3, 4]
    assert [logged.key[1] for logged in log.newest(100)] == [*range(5)]


def test_a_store_has_each_record_once():
    store = RecordStore()
    store.add("a", 0, [record(0), record(1)])
    store.add("a", 0, [record(0), record(1), record(2)])  # asked for by two at once
    store.add("b", 7, [record(3)])  # some were lost before
    assert [logged.key[1] for logged in store] == [0, 1, 2, 3]
    assert (store.next("a"), store.next("b")) == (3, 8)
    store.forget("a")  # another one may come with its address
    store.add("a", 0, [record(4)])
    assert [logged.key[1] for logged in store] == [0, 1, 2, 3, 4]


def some_stages(i, count):
    return tuple(
        Stage(f"tcp://10.0.0.{h}:40000", "comm", 10**6 + i + h, 0.1 + i + h, 0.2 + i + h)
        for h in range(count)
    )


@pytest.mark.parametrize("stages", [0, 999])
def test_a_full_store_takes_at_most_thirty_megabytes(stages):
    """One of an eighth of the size: an eighth of that."""
    store, tasks = RecordStore(RecordStore().size // 8), 5_000 // (1 + stages)
    tracemalloc.start()
    try:
        for first in range(0, tasks * 5 // 4, 10):
            batch = range(first, first + 10)
            sent = packed(record(i, i, some_stages(i, stages), name=f"y-{i}") for i in batch)
            store.add("a", first, unpacked(sent))
        assert len(store) == tasks
        assert tracemalloc.get_traced_memory()[0] <= 30e6 / 8
    finally:
        tracemalloc.stop()


FULL = record(
    7,
    stages=(Stage("b", "cma", 1, 0.5, 0.7, 0.1, 0.2), Stage("c", "ipc", 2)),
    fallbacks=(Fallback("c", "cma", "why"),),
    error="why",
)


def test_records_travel():
    (again,) = unpacked(packed([FULL]))
    assert again == FULL
    assert type(again.stages[0]) is Stage
    assert again.stages[1].wire_s is None
    assert unpacked(packed([])) == []


def test_records_of_another_version_are_refused(monkeypatch):
    monkeypatch.setattr(records, "own_version", lambda: "9.9")
    sent = packed([FULL])
    monkeypatch.undo()
    with pytest.raises(RegistrationError, match=r"got values of dask_p2p 9\.9"):
        unpacked(sent)


def test_a_run_has_the_records_of_one_array_and_one_number():
    runs = runs_of(
        [
            record(0, 1.0),
            record(1, 1.5, error="why"),
            record(1, 2.0),
            record(0, 1.2, name="p2p-rechunk-x"),
            record(1, 5.0, run=7),
            record(0, 5.1, run=7),
        ]
    )
    assert [(run.start_s, run.attempts) for run in runs] == [(5.0, 2), (1.2, 1), (1.0, 3)]
    assert runs_of([]) == ()


def test_a_block_that_was_lost_and_made_again_counts_once():
    first, again = (record(0, t, (Stage("b", "cma", n),)) for t, n in ((1.0, 100), (3.0, 30)))
    (run,) = runs_of([first, record(1, 1.0), again])
    assert {r.start_s for r in run.made} == {1.0, 3.0}
    assert (run.attempts, len(run.made)) == (3, 2)
    assert (run.least_bytes, run.moved_bytes) == (30, 130)


def test_an_attempt_that_was_cancelled_has_not_failed():
    errors = enumerate(("b is deaf", "ended"))
    (run,) = runs_of([record(0, t, error=error, outcome="cancelled") for t, error in errors])
    assert (run.state, run.failures) == ("cancelled", ("b is deaf",))


AGAIN = record(0, 3.0, run=1)  # in another run


def test_tables():
    runs = runs_of([record(0, 1.0, (Stage("b", "cma", 2000),), dtype="<f4>"), AGAIN])
    newest, oldest = repr(runs).splitlines()[1:]
    for text in ("p2p-transpose", "4 x 2", "1 of 2 x 1", "1.95 kiB", "cma 1"):
        assert text in oldest
    assert " - " in newest
    assert len({len(line) for line in repr(runs).splitlines()}) == 1
    assert "<td>" in runs[0]._repr_html_()
    html = runs._repr_html_()
    assert html.count("<tr>") == 3
    assert "&lt;f4&gt;" in html
    assert repr(RunTable()) == "no runs"
    assert "no runs" in RunTable()._repr_html_()


def test_a_data_frame():
    pandas = pytest.importorskip("pandas")
    frame = runs_of([record(0, 1.0, (Stage("b", "cma", 2000),)), AGAIN]).to_pandas()
    assert list(frame["moved_bytes"]) == [0, 2000]
    assert frame["start"][1] == pandas.Timestamp(1, unit="s", tz="UTC")
    assert list(RunTable().to_pandas()) == []


def test_without_pandas(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(InputError, match="pip install pandas"):
        RunTable().to_pandas()


def rank_record(i, start_s=0.0, waited_s=0.25, **values):
    name = "p2p-iterate-ranks-0123456789abcdef0123456789abcdef"
    values = {"name": name, "attempt": 1, "steps": 10} | values
    return record(i, start_s, (Stage("b", "link", 100, waited_s),), **values)


def test_ranks_are_as_far_as_the_last_and_as_busy_as_the_busiest():
    run = Run((rank_record(0, step=6), rank_record(1, step=4, waited_s=0.5)))
    assert run.operation == "p2p-iterate"
    row = cells(run)
    assert (row["steps"], row["waited"]) == ("4 of 10, mean 4/s", "50%, 125.00 ms per step")
    assert (run.steps, run.steps_per_s, run.waited_share) == (4, 4.0, 0.5)


def test_a_later_attempt_that_went_on_at_a_checkpoint():
    run = Run(
        (
            rank_record(0, step=6, error="lost"),
            rank_record(1, step=7, error="lost"),
            rank_record(0, 2.0, step=8, first_step=5, attempt=2, wanted_bytes=0),
            rank_record(1, 2.0, step=9, first_step=5, attempt=2, wanted_bytes=0),
        )
    )
    assert cells(run)["steps"] == "8 of 10, mean 3/s, attempt 2"


def test_empty_columns_are_left_out():
    transpose, of_ranks = Run((record(0),)), Run((rank_record(0, step=1),))
    assert [cells(transpose)[name] for name in ("steps", "waited")] == [""] * 2
    assert "waited" not in repr(RunTable([transpose]))
    assert "waited" in repr(RunTable([transpose, of_ranks]))


def test_attempts_are_counted():
    counters = Counters()
    stages = (Stage("b", "cma", 100, 0.5, 0.75, 0.0, 0.125), Stage("c", "ipc", 50, 1.0))
    counters.add(record(0, 1.0, stages, fallbacks=(Fallback("c", "cma", "why"),), kernel_s=0.25))
    counters.add(record(0, 1.0, stages[:1], name="p2p-rechunk-0123456789abcdef0123456789abcdef"))
    counters.add(record(1, 1.0, error="why", wasted_bytes=7))
    of_parts = {"up_bytes": 8, "down_bytes": 4, "up_s": 0.5, "function_s": 0.25, "down_s": 0.125}
    counters.add(record(0, name="p2p-on-gpu-0123456789abcdef0123456789abcdef", parts=2, **of_parts))
    assert counters.values() == {
        "received_bytes": {"cma": 200, "ipc": 50},
        "wasted_bytes": {"": 7},
        "wait_seconds": {"cma": 1.0, "ipc": 1.0},
        "transfer_seconds": {"cma": 1.5, "ipc": 0.0},
        "kernel_seconds": {"local": 0.25, "cma": 0.25, "ipc": 0.0},
        "copied_bytes": {"up": 8, "down": 4},
        "part_seconds": {"up": 0.5, "function": 0.25, "down": 0.125},
        "task_seconds": {"p2p-transpose": 2.0, "p2p-rechunk": 1.0, "p2p-on-gpu": 1.0},
        "tasks": {"p2p-transpose": 1, "p2p-rechunk": 1, "p2p-on-gpu": 1},
        "attempts": {"p2p-transpose": 2, "p2p-rechunk": 1, "p2p-on-gpu": 1},
        "fallbacks": {"cma": 1},
    }
    assert [*counters.values()] == [family.name for family in COUNTERS]


def test_sums_never_fall():
    totals = Totals()
    sums = []

    def record(worker, cma):
        totals.record(worker, {"received_bytes": {"cma": cma}, "leased_bytes": {"": 1}})
        sums.append(totals.values()["received_bytes"]["cma"])

    record("a", 100)
    record("b", 50)
    record("a", 120)
    totals.end("a")
    totals.end("a")
    record("b", 60)
    record("a", 5)  # a new one at its address
    record("b", 10)  # whose plugin was taken off, and put on again
    totals.record("b", {})
    assert sums == [100, 150, 170, 180, 185, 195]
    assert totals.values()["received_bytes"]["cma"] == 195
    assert not totals.values().keys() & {family.name for family in GAUGES}


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
