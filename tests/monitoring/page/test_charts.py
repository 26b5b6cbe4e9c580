"""The matrix of workers, and the newest runs over time."""

from math import isnan

import pytest

from dask_p2p.monitoring.charts import (
    PARTS,
    Speeds,
    bars,
    links,
    section_of,
    speed_chart,
    waiting_chart,
)
from dask_p2p.monitoring.feed import picture
from dask_p2p.monitoring.records import Fallback, Stage
from dask_p2p.monitoring.runs import runs_of
from tests.monitoring.support import record


def rows(chart):
    columns = chart.columns
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def cells(*records, workers=()):
    chart = links(records, workers)
    return chart, {(row["reader"], row["holder"]): row for row in rows(chart)}


def drawn(*records):
    chart = bars(runs_of(records))
    return chart, {part: [bar for bar in rows(chart) if bar["part"] == part] for part in PARTS}


def stage(holder, transport, nbytes, seconds):
    return Stage(holder, transport, nbytes, 0.0, seconds)


def test_speed_is_compared_with_the_best_link_of_the_same_transport():
    chart, cell_rows = cells(
        record(0, stages=(stage("b", "cma", 4_000_000_000, 1.0), stage("c", "cma", 10**9, 1.0))),
        record(
            1, stages=(stage("a", "comm", 10**8, 1.0), stage("b", "cma", 10**9, 1.5)), worker="c"
        ),
    )
    assert (chart.title, chart.workers) == ("Links", ["a", "b", "c"])
    assert cell_rows["a", "b"]["gbs"] == 4.0
    shares = {pair: row["share"] for pair, row in cell_rows.items()}
    of_c = {("c", "a"): 1, ("c", "b"): pytest.approx(1 / 1.5 / 4)}
    assert shares == {("a", "b"): 1, ("a", "c"): 0.25, **of_c}
    assert cell_rows["c", "a"]["transport"] == "comm"
    assert {cell["fallback"] for cell in cell_rows.values()} == {""}


def test_a_cell_adds_up():
    running = {"wanted_bytes": 2 * 10**9, "fallbacks": (Fallback("b", "cma", "not permitted"),)}
    _, cell_rows = cells(
        record(0, stages=(stage("b", "cma", 3 * 10**9, 1.0),)),
        record(1, stages=(stage("b", "comm", 10**9, 1.0),)),
        record(1, stages=(stage("b", "cma", 10**9, 1.0),), **running),
    )
    (cell,) = cell_rows.values()
    sums = {"transport": "cma", "gbs": 2.0, "nbytes": 5 * 10**9, "tasks": 3}
    texts = {"text": "cma 3.73 GiB, comm 0.93 GiB", "fallback": "cma: not permitted"}
    assert cell.items() >= {**sums, **texts}.items()


def test_regions_that_kernels_read_in_place_are_timed_by_them():
    _, cell_rows = cells(record(0, stages=(Stage("b", "ipc", 10**9, 0.1, None, 0.0, 0.5),)))
    assert cell_rows["a", "b"]["gbs"] == 2.0


def test_regions_without_times_have_no_speed():
    _, cell_rows = cells(record(0, stages=(Stage("b", "ipc", 10**9),)))
    assert isnan(cell_rows["a", "b"]["gbs"])
    assert isnan(cell_rows["a", "b"]["share"])
    assert cell_rows["a", "b"]["nbytes"] == 10**9


def test_idle_workers_are_there_too():
    chart, cell_rows = cells(workers=["tcp://h:10", "tcp://h:9"])
    assert (chart.workers, cell_rows) == (["h:9", "h:10"], {})
    assert chart.title == "Links: nothing has moved yet"


def span(bar):
    return pytest.approx((bar["left"], bar["right"]))


def test_a_task_and_its_stages():
    stages = (
        Stage("b", "cma", 100, waited_s=0.2, wire_s=0.5, begun_s=0.1, kernel_s=0.3),
        Stage("c", "comm", 50, waited_s=0.1, wire_s=0.1, begun_s=0.6, kernel_s=0.3),
    )
    chart, bars_by_part = drawn(record(0, 10.0, stages, kernel_s=0.05, worker="tcp://h:1"))
    (task,) = bars_by_part["task"]
    assert (task["left"], task["right"], task["stop_s"]) == (0.0, 1.0, 11.0)
    assert (task["worker"], task["block"], task["top"]) == ("h:1", "0, 0", 0.95)
    assert (task["holder"], task["transport"], task["nbytes"]) == ("2 holders", "cma, comm", 150)
    assert [span(bar) for bar in bars_by_part["waiting"]] == [(0.1, 0.3), (0.6, 0.7)]
    assert [span(bar) for bar in bars_by_part["transfer"]] == [(0.1, 0.6), (0.6, 0.7)]
    # The kernels of a stage come before its end; those of the worker's own blocks at first.
    assert [span(bar) for bar in bars_by_part["kernel"]] == [(0, 0.05), (0.3, 0.6), (0.7, 1.0)]
    assert [bar["holder"] for bar in bars_by_part["kernel"]] == ["itself", "b", "c"]
    assert [bar["nbytes"] for bar in bars_by_part["transfer"]] == [100, 50]
    edges = [task["bottom"], *(bars_by_part[part][0]["top"] for part in reversed(PARTS[1:]))]
    assert edges == sorted(edges), "one below the other, within the task"
    assert edges[-1] == task["top"]
    assert chart.columns["part"][0] == "task", "behind the others"
    assert chart.workers == ["h:1"]
    assert chart.title.startswith("Stages since ")


def test_the_newest_runs_are_shown_back_to_a_long_pause():
    def names(*starts_s):
        _, bars_by_part = drawn(*(record(0, start_s, name=f"y-{start_s}") for start_s in starts_s))
        return {bar["name"] for bar in bars_by_part["task"]}

    assert names(0.0, 1.5) == {"y-0.0", "y-1.5"}
    assert names(0.0, 10.0, 12.5) == {"y-12.5"}
    assert names(0.0, 10.0, 11.5) == {"y-10.0", "y-11.5"}
    assert names(8.0, 10.0, 11.5) == {"y-8.0", "y-10.0", "y-11.5"}


def test_bars_are_bounded(monkeypatch):
    monkeypatch.setattr("dask_p2p.monitoring.charts.MOST_BARS", 20)
    _, bars_by_part = drawn(*(record(i, i, (Stage("b", "cma", 1, 0.1, 0.1),)) for i in range(100)))
    assert [bar["block"] for bar in bars_by_part["task"]] == [f"{i}, 0" for i in range(95, 100)]
    assert bars_by_part["task"][0]["left"] == 0.0


def test_where_there_are_too_many_a_task_has_one_stage(monkeypatch):
    monkeypatch.setattr("dask_p2p.monitoring.charts.MOST_BARS", 20)
    stages = [Stage(f"h{i}", "cma", 10, 0.1, 0.2, 0.1 * i, 0.05) for i in range(4)]
    _, bars_by_part = drawn(*(record(0, worker=f"w{i}", stages=(*stages,)) for i in range(4)))
    assert {bar["worker"] for bar in bars_by_part["task"]} == {f"w{i}" for i in range(4)}
    for bar in bars_by_part["transfer"]:
        assert (bar["holder"], bar["transport"], bar["nbytes"]) == ("4 holders", "cma", 40)
        assert span(bar) == (0.0, 0.5)
    assert [bar["seconds"] for bar in bars_by_part["waiting"]] == [pytest.approx(0.4)] * 4
    assert [span(bar) for bar in bars_by_part["kernel"]] == [(0.4, 0.6)] * 4


def test_of_many_workers_the_busiest_rows_are_shown():
    chart, bars_by_part = drawn(
        *(record(i, stages=(Stage("w0", "cma", i),), worker=f"w{i}") for i in range(100))
    )
    assert chart.title.endswith(": the busiest 64 of 100 workers")
    assert chart.workers == [f"w{i}" for i in range(36, 100)]
    assert {bar["worker"] for bar in bars_by_part["task"]} == set(chart.workers)


def test_failed_attempts_are_shown():
    _, bars_by_part = drawn(record(0, error="b is deaf"), record(0, 1.0))
    assert [bar["error"] for bar in bars_by_part["task"]] == ["b is deaf", ""]


def test_no_runs():
    chart, bars_by_part = drawn()
    assert (chart.title, chart.workers) == ("Stages: no runs yet", [])
    assert set(bars_by_part) == set(PARTS)


def short(*workers):
    return links([], workers).workers


def test_names_are_short_where_that_is_unique():
    assert short("tcp://h:1", "tcp://h:2") == ["h:1", "h:2"]
    assert short("tcp://h:1", "ucxx://h:1") == ["tcp://h:1", "ucxx://h:1"]
    assert short("inproc://10.0.0.1/7/1", "b") == ["b", "10.0.0.1/7/1"]
    assert short() == []


NAME = "p2p-iterate-ranks-0123456789abcdef0123456789abcdef"


def rank_record(rank, step, stop_s, waited_s=0.0, **values):
    values = {"name": NAME, "attempt": 1, "steps": 100, "wanted_bytes": 0} | values
    stages = (Stage("b", "link", 100, waited_s),)
    return record(rank, 10.0, stages, step=step, stop_s=stop_s, **values)


def run_at(stop_s, *steps, **values):
    """A run of a section whose ranks have made these steps."""
    (run,) = runs_of(rank_record(rank, step, stop_s, **values) for rank, step in enumerate(steps))
    return run


def test_speeds_are_those_between_two_pictures():
    speeds = Speeds()
    charts = [
        speed_chart(run_at(at_s, step, step + 5), speeds) for at_s, step in ((12.0, 10), (13, 40))
    ]
    assert charts[0].columns == {"seconds": [2.0], "rate": [5.0], "step": [10]}
    assert charts[1].columns == {"seconds": [2.0, 3.0], "rate": [5.0, 30.0], "step": [10, 40]}
    assert charts[1].title == "p2p-iterate: 40 of 100 steps, now 13.3/s, mean 13.3/s, 4.50 s left"


@pytest.mark.parametrize(
    ("run", "title"),
    [
        (run_at(10.0, 0), "p2p-iterate: 0 of 100 steps, begun"),
        (run_at(11.0, 0), "p2p-iterate: 0 of 100 steps, no step for a while"),
        (run_at(11.0, 4, steps=0), "p2p-iterate: 4 steps, now 4/s, mean 4/s"),
        (run_at(11.0, 100, wanted_bytes=None), "p2p-iterate: 100 of 100 steps, mean 100/s, done"),
        (None, "Steps: no section has made any yet"),
    ],
)
def test_titles(run, title):
    assert speed_chart(run, Speeds()).title == title


def test_a_later_attempt_has_points_of_its_own():
    speeds = Speeds()
    speed_chart(run_at(12.0, 50), speeds)
    later = run_at(13.0, 30, attempt=2, first_step=20)
    assert speed_chart(later, speeds).columns["step"] == [30]
    assert speed_chart(later, speeds).columns["rate"] == [pytest.approx(10 / 3)]


def test_points_and_sections_are_bounded(monkeypatch):
    monkeypatch.setattr("dask_p2p.monitoring.charts.MOST_POINTS", 10)
    monkeypatch.setattr("dask_p2p.monitoring.charts.MOST_SECTIONS", 2)
    speeds = Speeds()
    for step in range(1, 100):
        chart = speed_chart(run_at(10.0 + step, step), speeds)
        assert len(chart.columns["step"]) < 10
        assert chart.columns["step"][-1] == step
        assert set(chart.columns["rate"]) == {1.0}
    for number in range(5):
        speed_chart(run_at(11.0, 1, name=f"p2p-spmd-ranks-{number}"), speeds)
    assert len(speeds._points) == 2


def test_waits_of_ranks():
    second_rank = rank_record(1, 10, 12.0, 0.5, worker="tcp://h:2")
    (run,) = runs_of([second_rank, rank_record(0, 10, 12.0, 1.0, worker="tcp://h:1")])
    chart = waiting_chart(run)
    assert (chart.title, chart.workers) == ("Waiting by rank", ["0, 0", "1, 0"])
    assert chart.columns == {
        "rank": ["0, 0", "1, 0"],
        "worker": ["h:1", "h:2"],
        "share": [0.5, 0.25],
        "text": ["50%, 100.00 ms per step", "25%, 50.00 ms per step"],
        "step": [10, 10],
    }


def test_of_many_ranks_those_that_wait_longest_are_shown(monkeypatch):
    monkeypatch.setattr("dask_p2p.monitoring.charts.MOST_RANKS", 2)
    (run,) = runs_of(rank_record(rank, 10, 12.0, rank / 10) for rank in range(4))
    chart = waiting_chart(run)
    assert (chart.title, chart.workers) == ("Waiting by rank: the longest 2 of 4", ["2, 0", "3, 0"])


def test_the_newest_section_is_shown_also_after_other_runs():
    section = [rank_record(0, 10, 12.0)]
    assert section_of(runs_of([record(0)])) is None
    assert picture([record(0)]).section == ""
    assert picture([record(0), *section]).section == NAME
    drawn = picture([*section, record(0, 20.0)])
    assert (drawn.section, drawn.steps.columns["step"]) == ("", [10])
    assert picture([rank_record(0, 0, 11.0, steps=0)]).section == ""
