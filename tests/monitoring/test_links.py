"""The matrix of workers."""

from __future__ import annotations

from math import isnan

import pytest

from dask_p2p.monitoring.links import links
from dask_p2p.monitoring.records import Fallback, Stage
from tests.monitoring.support import record


def cells(*records, workers=()):
    """The cells by their pair of reader and holder."""
    chart = links(records, workers)
    columns = chart.columns["cells"]
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return chart, {(row["reader"], row["holder"]): row for row in rows}


def stage(holder, transport, nbytes, seconds):
    return Stage(holder, transport, nbytes, 0.0, seconds)


def test_speed_is_compared_with_the_best_link_of_the_same_transport():
    chart, found = cells(
        record(0, stages=(stage("b", "cma", 4_000_000_000, 1.0), stage("c", "cma", 10**9, 1.0))),
        record(
            1, stages=(stage("a", "comm", 10**8, 1.0), stage("b", "cma", 10**9, 1.5)), worker="c"
        ),
    )
    assert (chart.title, chart.workers) == ("Links", ["a", "b", "c"])
    assert found["a", "b"]["gbs"] == 4.0
    assert [found[pair]["share"] for pair in (("a", "b"), ("a", "c"), ("c", "a"))] == [1, 0.25, 1]
    assert found["c", "b"]["share"] == pytest.approx(1 / 1.5 / 4)
    assert found["c", "a"]["transport"] == "comm"
    assert len(found) == 4


def test_a_cell_adds_up():
    _, found = cells(
        record(0, stages=(stage("b", "cma", 3 * 10**9, 1.0),)),
        record(1, stages=(stage("b", "comm", 10**9, 1.0),)),
        record(1, stages=(stage("b", "cma", 10**9, 1.0),), wanted_bytes=2 * 10**9),
    )
    (cell,) = found.values()
    assert (cell["transport"], cell["gbs"], cell["nbytes"], cell["tasks"]) == (
        "cma",
        2.0,
        5 * 10**9,
        3,
    )
    assert cell["text"] == "cma 3.73 GiB, comm 0.93 GiB"
    assert cell["fallback"] == ""


def test_fallbacks_are_told():
    fallback = Fallback("b", "cma", "not permitted")
    _, found = cells(
        record(0, stages=(stage("b", "comm", 1, 1.0),), fallbacks=(fallback,)),
        record(1, stages=(stage("c", "cma", 1, 1.0),)),
    )
    assert found["a", "b"]["fallback"] == "cma: not permitted"
    assert found["a", "c"]["fallback"] == ""


def test_what_kernels_read_in_place_is_timed_by_them():
    _, found = cells(record(0, stages=(Stage("b", "ipc", 10**9, 0.1, None, 0.0, 0.5),)))
    assert found["a", "b"]["gbs"] == 2.0


def test_what_was_not_timed_has_no_speed():
    _, found = cells(record(0, stages=(Stage("b", "ipc", 10**9),)))
    assert isnan(found["a", "b"]["gbs"])
    assert isnan(found["a", "b"]["share"])
    assert found["a", "b"]["nbytes"] == 10**9


def test_idle_workers_are_there_too():
    chart, found = cells(workers=["tcp://h:10", "tcp://h:9"])
    assert (chart.workers, found) == (["h:9", "h:10"], {})
    assert chart.title == "Links: nothing has moved yet"


def test_of_many_workers_the_busiest_are_shown():
    records = [
        record(0, stages=(stage("w0", "cma", i, 1.0),), worker=f"w{i}") for i in range(1, 100)
    ]
    chart, found = cells(*records)
    assert chart.title == "Links: the busiest 64 of 100 workers"
    assert len(found) == 63
    assert ("w99", "w0") in found
    assert ("w1", "w0") not in found
