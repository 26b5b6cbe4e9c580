"""The table of runs, and all that a page shows."""

from __future__ import annotations

import pytest

from dask_p2p.monitoring.picture import Tasks, picture, rows
from dask_p2p.monitoring.records import Stage
from dask_p2p.monitoring.runs import runs_of
from tests.monitoring.support import NAME, record

FROM_B = (Stage("b", "cma", 100),)


def table(records, **tasks):
    columns = rows(runs_of(records), {NAME: Tasks(**tasks)} if tasks else {})
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def test_the_figures_are_those_of_the_runs():
    records = [record(0, 1.0, FROM_B, dtype="f4"), record(1, 1.5, FROM_B, wasted_bytes=7)]
    (row,) = table(records)
    (run,) = runs_of(records)
    summary = run.summary()
    different = {"shape": "4 x 2", "blocks": "2 x 1", "axes": "1, 0", "transports": "cma 1"}
    assert {name: row[name] for name in summary} == summary | different
    assert (row["state"], row["progress"]) == ("done", 1.0)
    assert (row["moved"], row["least"], row["wall"]) == ("207 B", "200 B", "1.50 s")


def test_progress_goes_by_bytes():
    half = record(1, 1.0, (Stage("b", "cma", 50),), wanted_bytes=100)
    (row,) = table([record(0, 0.0, FROM_B), half], total=4, left=3)
    assert (row["state"], row["progress"]) == ("running", pytest.approx(1.5 / 4))
    assert (row["moved_bytes"], row["least_bytes"], row["made"]) == (150, 100, 1)
    (row,) = table([half])  # the scheduler knows nothing of it
    assert (row["state"], row["progress"]) == ("running", 0.5)


def test_progress_where_nothing_has_to_come():
    (row,) = table([record(0), record(1, wanted_bytes=0)], total=4, left=3)
    assert (row["state"], row["progress"]) == ("running", 0.25)


def test_between_two_tasks_a_run_is_running():
    (row,) = table([record(0, 0.0, FROM_B)], total=2, left=1)
    assert (row["state"], row["progress"]) == ("running", 0.5)
    (row,) = table([record(0, 0.0, FROM_B)], total=2, left=0)  # a part of it was wanted
    assert (row["state"], row["progress"]) == ("done", 1.0)


def test_the_run_before_stays_done():
    before = [record(0, 0.0, FROM_B), record(1, 0.0, FROM_B)]
    (row,) = table(before, total=2, left=2)
    assert row["state"] == "done"
    newer, older = table([*before, record(0, 5.0, FROM_B, wanted_bytes=400)], total=2, left=2)
    assert (newer["state"], newer["progress"]) == ("running", pytest.approx(0.25 / 2))
    assert older["state"] == "done"


def test_what_failed_for_good_is_told():
    (row,) = table([record(0, error="why"), record(1)])
    assert row["state"] == "failed"
    (row,) = table([record(0, error="why"), record(0, 2.0)])
    assert row["state"] == "done"


def test_columns_are_there_without_runs():
    assert set(rows([], {})) == set(rows(runs_of([record(0)]), {}))


def test_a_picture_is_of_all():
    stages = (Stage("tcp://h:2", "cma", 100, 0.1, 0.2),)
    live = record(1, 1.0, stages, worker="tcp://h:1", wanted_bytes=200)
    shown = picture([record(0, 0.0, stages, worker="tcp://h:1"), live], ["tcp://h:3"])
    assert shown.links.workers == ["h:1", "h:2", "h:3"]
    assert shown.stages.workers == ["h:1"]
    assert shown.runs["moved_bytes"] == [200]
    assert shown.running == {NAME}


def test_a_run_that_may_be_incomplete_is_left_out():
    records = [record(0, 0.0, name="old"), record(0, 5.0, name="new")]
    assert picture(records).runs["name"] == ["new", "old"]
    assert picture(records, is_cut=True).runs["name"] == ["new"]
    assert picture(records[:1], is_cut=True).runs["name"] == ["old"]
