"""The newest runs over time."""

from __future__ import annotations

import pytest

from dask_p2p.monitoring import bars as module
from dask_p2p.monitoring.bars import PARTS, bars
from dask_p2p.monitoring.records import Stage
from dask_p2p.monitoring.runs import runs_of
from tests.monitoring.support import record


def drawn(*records):
    """The bars by their parts."""
    chart = bars(runs_of(records))
    return chart, {
        part: [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        for part, columns in chart.columns.items()
    }


def span(bar):
    return pytest.approx((bar["left"], bar["right"]))


def test_a_task_and_its_stages():
    stages = (
        Stage("b", "cma", 100, waited_s=0.2, wire_s=0.5, begun_s=0.1, kernel_s=0.3),
        Stage("c", "comm", 50, waited_s=0.1, wire_s=0.1, begun_s=0.6, kernel_s=0.3),
    )
    chart, found = drawn(record(0, 10.0, stages, kernel_s=0.05, worker="tcp://h:1"))
    (task,) = found["task"]
    assert (task["left"], task["right"], task["stop_s"]) == (0.0, 1.0, 11.0)
    assert (task["worker"], task["block"], task["bottom"]) == ("h:1", "0, 0", -0.45)
    assert [span(bar) for bar in found["waiting"]] == [(0.1, 0.3), (0.6, 0.7)]
    assert [span(bar) for bar in found["transfer"]] == [(0.1, 0.6), (0.6, 0.7)]
    # The kernels of a stage come before its end; those of the worker's own blocks at first.
    assert [span(bar) for bar in found["kernel"]] == [(0, 0.05), (0.3, 0.6), (0.7, 1.0)]
    assert [bar["holder"] for bar in found["kernel"]] == ["itself", "b", "c"]
    assert [bar["nbytes"] for bar in found["transfer"]] == [100, 50]
    tops = {part: {bar["top"] for bar in found[part]} for part in PARTS}
    assert len(set().union(*tops.values()) - tops["task"]) >= 2, "one above the other"
    assert chart.workers == ["h:1"]
    assert chart.title.startswith("Stages from ")


def test_parts_that_took_no_time_are_not_drawn():
    _, found = drawn(record(0, stages=(Stage("b", "ipc", 10),)))
    assert {part: len(those) for part, those in found.items()} == dict.fromkeys(PARTS, 0) | {
        "task": 1
    }


def test_a_row_a_worker_and_a_track_for_what_runs_at_once():
    _, found = drawn(record(0), record(1, 0.5), record(2, 1.0), record(3, worker="b"))
    rows = [(bar["worker"], bar["bottom"]) for bar in found["task"]]
    (first, second, third, other) = [round(bottom, 6) for _, bottom in sorted(rows)]
    assert first == second == -0.45, "one after the other"
    assert third == 0.0, "at the same time"
    assert other == 0.55


def test_the_newest_runs_are_shown_back_to_a_long_pause():
    def names(*starts_s):
        _, found = drawn(*(record(0, start_s, name=f"y-{start_s}") for start_s in starts_s))
        return {bar["name"] for bar in found["task"]}

    assert names(0.0, 1.5) == {"y-0.0", "y-1.5"}
    assert names(0.0, 10.0, 12.5) == {"y-12.5"}
    assert names(0.0, 10.0, 11.5) == {"y-10.0", "y-11.5"}
    assert names(8.0, 10.0, 11.5) == {"y-8.0", "y-10.0", "y-11.5"}


def test_bars_are_bounded(monkeypatch):
    monkeypatch.setattr(module, "_MOST_BARS", 20)
    _, found = drawn(*(record(i, i, (Stage("b", "cma", 1, 0.1, 0.1),)) for i in range(100)))
    assert [bar["block"] for bar in found["task"]] == [f"{i}, 0" for i in range(95, 100)]
    assert found["task"][0]["left"] == 0.0


def test_where_there_are_too_many_a_task_has_one_stage(monkeypatch):
    monkeypatch.setattr(module, "_MOST_BARS", 20)
    stages = [Stage(f"h{i}", "cma", 10, 0.1, 0.2, 0.1 * i, 0.05) for i in range(4)]
    _, found = drawn(*(record(0, worker=f"w{i}", stages=(*stages,)) for i in range(4)))
    assert {bar["worker"] for bar in found["task"]} == {f"w{i}" for i in range(4)}
    for bar in found["transfer"]:
        assert (bar["holder"], bar["transport"], bar["nbytes"]) == ("4 holders", "cma", 40)
        assert span(bar) == (0.0, 0.5)
    assert [bar["seconds"] for bar in found["waiting"]] == [pytest.approx(0.4)] * 4
    assert [span(bar) for bar in found["kernel"]] == [(0.4, 0.6)] * 4


def test_of_many_workers_the_busiest_are_shown():
    chart, found = drawn(
        *(record(i, stages=(Stage("w0", "cma", i),), worker=f"w{i}") for i in range(100))
    )
    assert chart.title.endswith(": the busiest 64 of 100 workers")
    assert chart.workers == [f"w{i}" for i in range(36, 100)]
    assert {bar["worker"] for bar in found["task"]} == set(chart.workers)


def test_failed_attempts_are_told():
    _, found = drawn(record(0, error="b is deaf"), record(0, 1.0))
    assert [bar["error"] for bar in found["task"]] == ["b is deaf", ""]


def test_nothing():
    chart, found = drawn()
    assert (chart.title, chart.workers) == ("Stages: no runs yet", [])
    assert set(found) == set(PARTS)
