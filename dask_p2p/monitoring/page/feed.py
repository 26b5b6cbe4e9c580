"""What pages show, and how it comes to the scheduler: asked for while somebody looks.

Nothing here needs bokeh. Any number of pages share one feed, and each of its pictures.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from math import prod
from typing import Any, NamedTuple

from dask.utils import format_bytes

from dask_p2p.monitoring.page.charts import Chart, Columns, as_columns, bars, links
from dask_p2p.monitoring.records import Record, RecordStore
from dask_p2p.monitoring.runs import Run, runs_of
from dask_p2p.monitoring.tables import cells

#: Between two questions to a worker, at least.
INTERVAL_S = 0.5
#: Columns of the table of runs that are shown. It has ``name`` and ``state`` as well.
TABLE = (
    *("start", "operation", "shape", "dtype", "blocks", "axes", "progress", "moved", "least"),
    *("exchange", "wall", "GB/s", "transports", "attempts", "fallbacks", "steps", "waited"),
    "overlap",
)

_S_PER_WORKER = 2e-3  # between two rounds: asking one takes the scheduler about a quarter of that
_FORGET_S = 10.0  # after which a page that is opened does not show what was under way
_SIZE = 10_000  # records and their stages in a picture
_MOST_RUNS = 100


class Tasks(NamedTuple):
    """The tasks of an output array that the scheduler knows."""

    total: int = 0
    left: int = 0  # those that have still to end


class Picture(NamedTuple):
    """All that a page shows at a moment."""

    links: Chart
    stages: Chart
    runs: Columns
    running: frozenset[str]  # names of the output arrays that are being computed


class Feed:
    """Asks the workers twice a second while somebody looks; all on the scheduler's event loop."""

    def __init__(
        self,
        records: RecordStore,  # of the scheduler: what workers have told
        workers: Callable[[], Iterable[str]],  # addresses of those that may be asked
        ask: Callable[[str], Awaitable[list[Record] | None]],  # a worker; returns those under way
        tasks: Callable[[str], Tasks],  # of an output array, by its name
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.records, self.ask, self._clock = records, ask, clock
        self._workers, self._tasks = workers, tasks
        self._under_way: dict[str, list[Record]] = {}
        self._asked: dict[str, asyncio.Future[None]] = {}  # that have not answered
        self.last_round_s = 0.0  # when questions were asked last, by the clock
        self._inputs: Any = None  # of the newest picture
        self._picture = picture([])

    def look(self) -> Picture:
        """Return what there is to show, and ask for more. Call it while somebody can see it."""
        workers = [*self._workers()]
        since_s = self._clock() - self.last_round_s
        if since_s >= max(INTERVAL_S, _S_PER_WORKER * len(workers)):
            if since_s > _FORGET_S:
                self._under_way.clear()
            self.last_round_s += since_s
            for worker in workers:
                if worker not in self._asked:  # one that stands still is asked once
                    self._asked[worker] = asyncio.ensure_future(self._ask_one(worker))
        return self.picture()

    def picture(self) -> Picture:
        """Return what there is to show: the same object as before where nothing has changed."""
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
            self._picture = picture([*records, *under_way], workers, tasks, is_cut=is_cut)
        return self._picture

    def forget(self, worker: str) -> None:
        """Forget a worker that has left; its records stay."""
        self._under_way.pop(worker, None)
        if asked := self._asked.pop(worker, None):
            asked.cancel()

    def close(self) -> None:
        """Wait for no more answers."""
        for worker in [*self._asked]:
            self.forget(worker)

    async def _ask_one(self, worker: str) -> None:
        try:
            with suppress(Exception):  # the page goes on with what the others tell
                self._under_way[worker] = await self.ask(worker) or []
        finally:
            self._asked.pop(worker, None)


def picture(
    records: Sequence[Record],
    workers: Iterable[str] = (),
    tasks: Mapping[str, Tasks] | None = None,
    *,
    is_cut: bool = False,
) -> Picture:
    """Return what a page shows of records, also of those under way.

    `workers` are the addresses in the cluster; `tasks` are known by the name of the output array,
    for those that may have some left; `is_cut` says that there were older records, perhaps of the
    oldest run.
    """
    found = runs_of(records)
    runs = found[:-1] if is_cut and len(found) > 1 else found
    known, left = [], dict(tasks or {})
    for run in runs:  # only the newest of an array may have tasks left, unless it has made all
        of_array = left.pop(run.name, Tasks())
        known.append((run, of_array if len(run.made) < of_array.total else Tasks()))
    running = frozenset(run.name for run, of in known if run.under_way or of.left)
    rows = [_row(run, of) for run, of in known[:_MOST_RUNS]]
    table = as_columns(rows, ("name", "state", *TABLE))
    return Picture(links(records, workers), bars(runs), table, running)


def _row(run: Run, tasks: Tasks) -> tuple[Any, ...]:
    """Return a row of the table; progress is 0 to 1."""
    failed = {record.key for record in run.records if record.error}
    state = "failed" if failed - {record.key for record in run.made} else "done"
    row: dict[str, Any] = cells(run) | {"progress": 1.0}
    if run.under_way or tasks.left:
        state = "running"
        placed = [sum(stage.nbytes for stage in record.stages) for record in run.under_way]
        row["moved"] = format_bytes(run.moved_bytes + sum(placed))
        is_section = any(record.attempt for record in run.records)
        row["progress"] = _of_steps(run) if is_section else _of_tasks(run, tasks, placed)
    row["start"] = time.strftime("%H:%M:%S", time.localtime(run.start_s))
    return run.name, state, *(row[name] for name in TABLE)


def _of_tasks(run: Run, tasks: Tasks, placed: Sequence[int]) -> float:
    """Return the share of tasks that have ended, and of bytes in place for those under way."""
    done = float(max(tasks.total - tasks.left, len(run.made)))
    for record, nbytes in zip(run.under_way, placed, strict=True):
        done += nbytes / record.wanted_bytes if record.wanted_bytes else 0.0
    return min(1.0, done / max(tasks.total, len(run.made) + len(run.under_way)))


def _of_steps(run: Run) -> float:
    """Return the share of steps that the members of a section have done.

    Its commit task and its inputs do not count: the members do all the work.
    """
    done = {record.key: 1.0 for record in run.made}
    for record in run.under_way:
        done[record.key] = record.step / record.steps if record.steps else 0.0
    return min(1.0, sum(done.values()) / max(prod(run.blocks), len(done)))
