"""Records and where they are kept, without a cluster."""

from __future__ import annotations

import sys
import tracemalloc

import pytest

from dask_p2p.errors import InputError, RegistrationError
from dask_p2p.monitoring import records
from dask_p2p.monitoring.records import Fallback, RecordLog, RecordStore, Stage, packed, unpacked
from dask_p2p.monitoring.runs import Run, RunTable, cells, runs_of
from tests.monitoring.support import record


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
