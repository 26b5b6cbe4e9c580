"""The speed of a section over time, and the waits of its ranks."""

from __future__ import annotations

import pytest

from dask_p2p.monitoring.charts import Speeds, section_of, speed_chart, waiting_chart
from dask_p2p.monitoring.feed import picture
from dask_p2p.monitoring.records import Stage
from dask_p2p.monitoring.runs import runs_of
from tests.monitoring.support import record

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
    (run,) = runs_of(
        [
            rank_record(1, 10, 12.0, 0.5, worker="tcp://h:2"),
            rank_record(0, 10, 12.0, 1.0, worker="tcp://h:1"),
        ]
    )
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
    assert chart.title == "Waiting by rank: the longest 2 of 4"
    assert chart.workers == ["2, 0", "3, 0"]


def test_the_newest_section_is_shown_also_after_other_runs():
    section = [rank_record(0, 10, 12.0)]
    assert section_of(runs_of([record(0)])) is None
    assert picture([record(0)]).section == ""
    assert picture([record(0), *section]).section == NAME
    drawn = picture([*section, record(0, 20.0)])
    assert drawn.section == ""
    assert drawn.steps.columns["step"] == [10]
    assert picture([rank_record(0, 0, 11.0, steps=0)]).section == ""
