"""All that a page shows at a moment: plain lists, for whatever draws them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dask.utils import format_bytes, format_time

from dask_p2p.monitoring.bars import bars
from dask_p2p.monitoring.charts import Chart, Columns, as_columns
from dask_p2p.monitoring.links import links
from dask_p2p.monitoring.records import Record
from dask_p2p.monitoring.runs import Run, runs_of

__all__ = ["Picture", "Tasks", "picture", "rows"]

_MOST_RUNS = 100


class Tasks(NamedTuple):
    """The tasks of an output array that the scheduler knows."""

    total: int = 0
    left: int = 0  # those that have still to end


@dataclass(frozen=True, eq=False)
class Picture:
    """All that a page shows at a moment."""

    links: Chart
    stages: Chart
    runs: Columns
    running: frozenset[str]  # names of the output arrays that are being computed


def picture(
    records: Iterable[Record],
    workers: Iterable[str] = (),
    tasks: Mapping[str, Tasks] | None = None,
    *,
    is_cut: bool = False,
) -> Picture:
    """Return what a page shows.

    Parameters
    ----------
    records
        Of attempts that ended, and of those under way.
    workers
        Addresses of those that are in the cluster.
    tasks
        By the name of the output array, for those that may have some left.
    is_cut
        Whether there were older records, perhaps of the oldest run.
    """
    records, tasks = list(records), tasks or {}
    runs = runs_of(records)
    shown = runs[:-1] if is_cut and len(runs) > 1 else runs
    running = frozenset(run.name for run in runs if _is_running(run, _tasks(run, tasks)))
    table = rows(shown[:_MOST_RUNS], tasks)
    return Picture(links(records, workers), bars(shown), table, running)


def rows(runs: Sequence[Run], tasks: Mapping[str, Tasks]) -> Columns:
    """Return a table of runs: columns as `Run.summary` names them, and some more.

    Returns
    -------
    dict
        What has several parts is written as text. ``state`` is "running", "done" or "failed",
        ``progress`` goes from 0 to 1 by bytes, ``start`` is the time of day; ``moved``, ``least``,
        ``exchange`` and ``wall`` are figures as people read them.
    """
    table = [_row(run, _tasks(run, tasks)) for run in runs]
    names = tuple(_row(_NO_RUN, Tasks()))
    return as_columns([tuple(row.values()) for row in table], names)


_NO_RUN = Run((Record(("",), 0.0, 0.0),))


def _row(run: Run, tasks: Tasks) -> dict[str, Any]:
    row = run.summary()
    row["moved_bytes"] += _placed_bytes(run)
    row["transports"] = ", ".join(f"{name} {pairs}" for name, pairs in run.transports.items())
    for name, between in (("shape", " x "), ("blocks", " x "), ("axes", ", ")):
        row[name] = between.join(map(str, row[name]))
    running = _is_running(run, tasks)
    failed = {r.key for r in run.records if r.error} - {r.key for r in run.made}
    row["state"] = "running" if running else "failed" if failed else "done"
    row["progress"] = _progress(run, tasks) if running else 1.0
    row["start"] = time.strftime("%H:%M:%S", time.localtime(run.start_s))
    row |= {name: format_bytes(row[f"{name}_bytes"]) for name in ("moved", "least")}
    return row | {name: format_time(row[f"{name}_s"]) for name in ("exchange", "wall")}


def _tasks(run: Run, tasks: Mapping[str, Tasks]) -> Tasks:
    """Return those that the run may have: an earlier one of the same array has made all."""
    known = tasks.get(run.name, Tasks())
    return Tasks() if len({record.key for record in run.made}) >= known.total else known


def _is_running(run: Run, tasks: Tasks) -> bool:
    return bool(run.under_way or tasks.left)


def _placed_bytes(run: Run) -> int:
    return sum(stage.nbytes for record in run.under_way for stage in record.stages)


def _progress(run: Run, tasks: Tasks) -> float:
    """Return which part of a run's bytes is in place, if tasks that are not known move as much."""
    known = len(run.made) + len(run.under_way)
    wanted_bytes = run.least_bytes + sum(record.wanted_bytes or 0 for record in run.under_way)
    total = max(tasks.total, known)
    done = 1.0 * max(tasks.total - tasks.left, len(run.made))
    if wanted_bytes:
        done += _placed_bytes(run) * known / wanted_bytes
    return min(1.0, done / total)
