"""The data of the pages. The scheduler requests it from workers while a page is open.

This module does not need bokeh. All pages share one feed and its pictures.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from math import prod
from typing import Any, NamedTuple

from dask_p2p.monitoring.charts import (
    Chart,
    Columns,
    Speeds,
    as_columns,
    bars,
    links,
    section_of,
    speed_chart,
    waiting_chart,
)
from dask_p2p.monitoring.records import RecordStore, TaskRecord
from dask_p2p.monitoring.runs import Run, cells, fetch_records_and_tasks, runs_of, text_table

INTERVAL_S_PER_WORKER = 2e-3  # a request takes the scheduler a quarter of this time

#: Shortest interval between two requests to a worker.
INTERVAL_S = 0.5
#: Visible columns of the table of runs, with their meanings. It also has ``name`` and ``state``.
TABLE = {
    "start": "Time when the first task of the run started",
    "operation": "Prefix of the names of its tasks",
    "shape": "Shape of the output array",
    "dtype": "Data type of the output array",
    "blocks": "Finished blocks, of all blocks along each axis; or ranks of a section",
    "progress": "Finished share of the blocks or steps; then the outcome",
    "moved": "Bytes that workers read from other workers so far",
    "least": "Bytes that had to move, without any read again after a failure",
    "longest task": "Time of the longest task",
    "wall": "Time from the start of the first task to the end of the last one",
    "GB/s": "1e9 bytes moved per second, by all workers together",
    "transports": "Number of pairs of workers by transport",
    "attempts": "Attempts at tasks; more than blocks after failures",
    "fallbacks": "Pairs of workers that fell back to another transport",
    "steps": "Steps that all ranks have finished, and their mean speed",
    "waited": "Share of its time, and time per step, that the slowest rank waited for others",
}

_FORGET_S = 10.0  # maximum age of the records of running tasks
_SIZE = 10_000  # number of records and stages in a picture
_MOST_RUNS = 100


class Tasks(NamedTuple):
    """The numbers of the tasks of an array, or of several, on the scheduler."""

    total: int = 0
    left: int = 0  # unfinished tasks


class Picture(NamedTuple):
    """The content of a page at a moment."""

    links: Chart
    stages: Chart
    runs: Columns
    steps: Chart  # speed of the newest section
    waiting: Chart  # waits of its ranks
    section: str  # name of the newest run if it is a section with steps; empty otherwise
    running: frozenset[str]  # names of the output arrays that are being computed


class Feed:
    """The source of the pages' data: it requests records twice a second while a page is open.

    All methods run on the scheduler's event loop.
    """

    def __init__(
        self,
        records: RecordStore,  # the scheduler's
        workers: Callable[[], Iterable[str]],  # returns the addresses of reachable workers
        ask: Callable[[str], Awaitable[list[TaskRecord] | None]],  # records of running tasks
        tasks: Callable[[str], Tasks],  # returns the tasks of an output array, by its name
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.records, self.ask, self._clock = records, ask, clock
        self._workers, self._tasks = workers, tasks
        self._under_way: dict[str, list[TaskRecord]] = {}
        self._requests: dict[str, asyncio.Future[None]] = {}  # pending requests, by worker
        self.last_round_s = 0.0  # time of the last requests, by the clock
        self._inputs: Any = None  # inputs of the newest picture
        self._speeds = Speeds()
        self._picture = picture([])

    def refresh(self) -> Picture:
        """Return the current picture, and request new records. Call it while a page is open."""
        workers = [*self._workers()]
        since_s = self._clock() - self.last_round_s
        if since_s >= max(INTERVAL_S, INTERVAL_S_PER_WORKER * len(workers)):
            if since_s > _FORGET_S:
                self._under_way.clear()
            self.last_round_s += since_s
            for worker in workers:
                if worker not in self._requests:  # one pending request per worker
                    self._requests[worker] = asyncio.ensure_future(self._ask_one(worker))
        return self.picture()

    def picture(self) -> Picture:
        """Return the current picture, the same object as before if it has not changed."""
        count, workers = self.records.count, sorted(self._workers())
        _, last = self.records.since(count - 1)
        under_way = [record for some in self._under_way.values() for record in some]
        names = {record.name for record in [*last, *under_way]} | self._picture.running
        tasks = {name: self._tasks(name) for name in names}
        inputs = count, under_way, tasks, workers
        if inputs != self._inputs:
            self._inputs = inputs
            records = self.records.newest(_SIZE)
            is_cut = len(records) < count
            self._picture = picture(
                [*records, *under_way], workers, tasks, self._speeds, is_cut=is_cut
            )
        return self._picture

    def forget(self, worker: str) -> None:
        self._under_way.pop(worker, None)
        if request := self._requests.pop(worker, None):
            request.cancel()

    def close(self) -> None:
        for worker in [*self._requests]:
            self.forget(worker)

    async def _ask_one(self, worker: str) -> None:
        try:
            with suppress(Exception):  # the page shows the records of the other workers
                self._under_way[worker] = await self.ask(worker) or []
        finally:
            self._requests.pop(worker, None)


def picture(
    records: Sequence[TaskRecord],
    workers: Iterable[str] = (),
    tasks: Mapping[str, Tasks] | None = None,
    speeds: Speeds | None = None,
    *,
    is_cut: bool = False,
) -> Picture:
    """Return the picture of records, including those of running tasks.

    `workers` are the addresses in the cluster. `tasks` are the tasks of output arrays by name, for
    arrays with unfinished tasks. `speeds` are those of earlier pictures. `is_cut` is true if older
    records are missing; the oldest run may then be incomplete.
    """
    all_runs = runs_of(records)
    runs = all_runs[:-1] if is_cut and len(all_runs) > 1 else all_runs
    runs_and_tasks, unassigned_tasks = [], dict(tasks or {})
    for run in runs:  # unfinished tasks belong to an array's newest run, unless it is complete
        of_array = unassigned_tasks.pop(run.name, Tasks())
        runs_and_tasks.append((run, of_array if len(run.made) < of_array.total else Tasks()))
    running = frozenset(
        run.name for run, run_tasks in runs_and_tasks if run.under_way or run_tasks.left
    )
    rows = [_row(run, run_tasks) for run, run_tasks in runs_and_tasks[:_MOST_RUNS]]
    table = as_columns(rows, ("name", "state", *TABLE))
    section = section_of(runs)
    steps = speed_chart(section, Speeds() if speeds is None else speeds)
    newest = section.name if section is not None and section is runs[0] else ""
    charts = links(records, workers), bars(runs), table, steps, waiting_chart(section)
    return Picture(*charts, newest, running)


def has_figures(values: Iterable[Any]) -> bool:
    """Return whether a column of the table has figures for any of its runs; else it is hidden."""
    return not {*map(str, values)} <= {"", "0", "-"}


async def fetch_runs_text(client: Any, n: int) -> str:
    """Return the page's table of a cluster's newest `n` runs, as text for a terminal."""
    records, tasks = await fetch_records_and_tasks(client, n)
    columns = picture(records, tasks={name: Tasks(*counts) for name, counts in tasks.items()}).runs
    columns["progress"] = [
        f"{value:.0%}" if state == "running" else state
        for value, state in zip(columns["progress"], columns["state"], strict=True)
    ]
    shown = [name for name in TABLE if has_figures(columns[name])]
    rows = zip(*(columns[name] for name in shown), strict=True)
    return text_table([shown, *rows]) if records else "no runs"


def _row(run: Run, tasks: Tasks) -> tuple[Any, ...]:
    state = "running" if run.state == "done" and tasks.left else run.state
    row: dict[str, Any] = cells(run) | {"progress": 1.0}
    if run.under_way or tasks.left:
        row["progress"] = _progress(run, tasks)  # from 0 to 1
    row["start"] = time.strftime("%H:%M:%S", time.localtime(run.start_s))
    return run.name, state, *(row[name] for name in TABLE)


def _progress(run: Run, tasks: Tasks) -> float:
    """Return the finished fraction of a section's steps, or of tasks by their bytes in place."""
    if run.latest:  # commit tasks and inputs do not count: ranks do all the work
        fractions = {record.key: 1.0 for record in run.made}
        for record in run.under_way:
            fractions[record.key] = record.step / record.steps if record.steps else 0.0
        return min(1.0, sum(fractions.values()) / max(prod(run.blocks), len(fractions)))
    finished_tasks = float(max(tasks.total - tasks.left, len(run.made)))
    for record in run.under_way:
        placed_bytes = sum(stage.nbytes for stage in record.stages)
        finished_tasks += placed_bytes / record.wanted_bytes if record.wanted_bytes else 0.0
    return min(1.0, finished_tasks / max(tasks.total, len(run.made) + len(run.under_way)))
