"""The data of the page about a section: its speed over time, and the waits of each rank.

This module does not need bokeh.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from dask.utils import natural_sort_key

from dask_p2p import tuning
from dask_p2p.monitoring.page.charts import Chart, as_columns
from dask_p2p.monitoring.runs import Run
from dask_p2p.monitoring.tables import pace_text, waits_text

_RECENT = 10  # points that the time left is computed from


class Speed(NamedTuple):
    """Steps of a section a second, between two points in time."""

    seconds: float  # since the start of the attempt
    rate: float
    step: int  # the last one of the interval


class RankWait(NamedTuple):
    """The time that a rank waited for others, in its latest attempt."""

    rank: str
    worker: str
    share: float  # of its time: 0 to 1
    text: str
    step: int  # its steps so far


class Speeds:
    """Points in time of running sections: the step at each. Seen while a page is open."""

    def __init__(self) -> None:
        self._points: dict[tuple[str, int, int], list[tuple[float, int]]] = {}

    def add(self, run: Run) -> list[tuple[float, int]]:
        """Add the current step of a section; return its points, the first one at its start."""
        attempt = max(record.attempt for record in run.latest)
        own = [record for record in run.latest if record.attempt == attempt]
        start_s, first = min((record.start_s, record.first_step) for record in own)
        key = run.name, run.records[0].run, attempt
        points = self._points.setdefault(key, [(start_s, first)])
        if len(self._points) > tuning.current.speed_sections:
            del self._points[next(iter(self._points))]
        at_s, step = max(record.stop_s for record in own), min(record.step for record in own)
        if at_s > points[-1][0] and step >= points[-1][1]:
            points.append((at_s, step))
        if len(points) > tuning.current.speed_points:
            del points[1:-1:2]
        return points


def section_of(runs: Sequence[Run]) -> Run | None:
    """Return the newest run with steps; `runs` is sorted with the newest run first."""
    return next((run for run in runs if run.all_steps or run.steps), None)


def speed_chart(run: Run | None, speeds: Speeds) -> Chart:
    """Return the speed of a section over time, a `Speed` for each interval."""
    if run is None:
        return Chart("Steps: no section has made any yet", [], as_columns([], Speed._fields))
    points = speeds.add(run)
    begun_s = points[0][0]
    found = [
        Speed(at_s - begun_s, (step - before) / (at_s - before_s), step)
        for (before_s, before), (at_s, step) in pairwise(points)
    ]
    return Chart(_title(run, points), [], as_columns(found, Speed._fields))


def _title(run: Run, points: Sequence[tuple[float, int]]) -> str:
    """Return the steps of a section, and while it runs its speeds and the time left."""
    (old_s, old), (new_s, new) = points[-_RECENT - 1 :][0], points[-1]
    rate = (new - old) / (new_s - old_s) if new > old else 0.0
    is_running = run.state == "running"
    text = pace_text(run.steps, run.all_steps, rate if is_running else 0.0, run.steps_per_s)
    if not is_running:
        text += f", {run.state}"
    elif not rate:
        text += ", no step for a while" if points[1:] else ", begun"
    return f"{run.operation}: {text}"


def waiting_chart(run: Run | None) -> Chart:
    """Return the waits of a section's ranks, a `RankWait` for each."""
    title = "Waiting by rank"
    if run is None:
        return Chart(title, [], as_columns([], RankWait._fields))
    by_wait = sorted(run.latest, key=lambda record: -record.waited_share)
    most = by_wait[: tuning.current.waiting_ranks]
    if len(most) < len(run.latest):
        title += f": the longest {len(most)} of {len(run.latest)}"
    found = [
        RankWait(
            record.block,
            record.worker.rpartition("://")[2],
            record.waited_share,
            waits_text(record.waited_share, record.waited_per_step_s),
            record.step,
        )
        for record in sorted(most, key=lambda record: natural_sort_key(record.block))
    ]
    return Chart(title, [each.rank for each in found], as_columns(found, RankWait._fields))
