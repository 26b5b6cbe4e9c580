from __future__ import annotations

from dask_p2p.monitoring.records import Stage
from dask_p2p.monitoring.runs import Run, RunTable, cells
from tests.monitoring.support import record


def rank_record(i, start_s=0.0, waited_s=0.25, **values):
    name = "p2p-iterate-ranks-0123456789abcdef0123456789abcdef"
    values = {"name": name, "attempt": 1, "steps": 10} | values
    return record(i, start_s, (Stage("b", "link", 100, waited_s),), **values)


def test_ranks_are_as_far_as_the_last_and_as_busy_as_the_busiest():
    run = Run((rank_record(0, step=6), rank_record(1, step=4, waited_s=0.5)))
    assert run.operation == "p2p-iterate"
    row = cells(run)
    assert (row["steps"], row["waited"]) == ("4 of 10, mean 4/s", "50%, 125 ms per step")
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
