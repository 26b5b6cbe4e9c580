"""The page's data as plain columns: a matrix of links, and the newest runs as bars over time.

This module does not need bokeh.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from math import inf, nan
from typing import Any, NamedTuple, TypeAlias

from dask.utils import format_bytes, natural_sort_key

from dask_p2p.monitoring.records import Stage, TaskRecord
from dask_p2p.monitoring.runs import Run, pace_text, waits_text

MOST_BARS = 4000  # of a chart
MOST_POINTS = 600  # of a section's speed; later ones replace every second one
MOST_SECTIONS = 20  # with such points
MOST_RANKS = 64  # in the chart of waits: those that wait longest

Columns: TypeAlias = dict[str, list[Any]]
_Stages: TypeAlias = dict[str, list[Stage]]  # by transport

#: Kinds of bars: a whole task, or its activities for one holder.
PARTS = ("task", "waiting", "transfer", "kernel")

_MOST_WORKERS = 64  # workers in a chart: those that move most bytes
_REASONS = 3  # reasons of fallbacks in a cell


class Chart(NamedTuple):
    """The data of one chart."""

    title: str
    workers: list[str]  # short names, in the order of the chart
    columns: Columns


class Cell(NamedTuple):
    """The reads of one worker from another."""

    reader: str
    holder: str
    transport: str  # transport of most bytes
    gbs: float  # speed of this transport in GB/s (1e9 bytes); nan if not measured
    share: float  # `gbs` as a fraction of this transport's fastest link; may be nan
    nbytes: int  # bytes by all transports
    tasks: int
    text: str  # bytes by transport, as text
    waited_s: float  # seconds that the reader's tasks waited
    fallback: str  # failed transports with reasons; empty if none failed


class Bar(NamedTuple):
    """A task, or its activity for one holder."""

    part: str  # one of `PARTS`
    left: float  # seconds since the first task shown
    right: float
    bottom: float  # from 0 to 1 in the last worker's row, from 1 to 2 in the row above
    top: float
    worker: str
    holder: str
    transport: str
    nbytes: int
    seconds: float
    name: str  # name of the output array
    block: str
    error: str
    stop_s: float  # end of the task, since the epoch


def as_columns(rows: Sequence[tuple[Any, ...]], names: Sequence[str]) -> Columns:
    """Return rows as columns with these names."""
    return {name: [row[i] for row in rows] for i, name in enumerate(names)}


def links(records: Iterable[TaskRecord], workers: Iterable[str] = ()) -> Chart:
    """Return the matrix of links, a `Cell` for each pair. Includes all of `workers`."""
    read: defaultdict[tuple[str, str], _Stages] = defaultdict(lambda: defaultdict(list))
    failed: defaultdict[tuple[str, str], dict[str, str]] = defaultdict(dict)  # reasons
    moved = Counter(dict.fromkeys(workers, 0))
    for record in records:
        for stage in record.stages:
            read[record.worker, stage.holder][stage.transport].append(stage)
            moved[record.worker] += stage.nbytes
            moved[stage.holder] += stage.nbytes
        for holder, transport, reason in record.fallbacks:
            failed[record.worker, holder][transport] = reason
    best: defaultdict[str, float] = defaultdict(float)
    for by_transport in read.values():
        for transport, stages in by_transport.items():
            best[transport] = max(best[transport], _gbs(stages))  # nan is never the maximum
    shown, note = _busiest(moved)
    names = _short_names(shown)
    cells = [
        Cell(names[reader], names[holder], *_figures(by_transport, failed[reader, holder], best))
        for (reader, holder), by_transport in read.items()
        if {reader, holder} <= names.keys()
    ]
    title = f"Links{note if read else ': nothing has moved yet'}"
    return Chart(title, [*names.values()], as_columns(cells, Cell._fields))


def _gbs(stages: Iterable[Stage]) -> float:
    timed = [(s.nbytes, s.kernel_s if s.wire_s is None else s.wire_s) for s in stages]
    timed = [(nbytes, seconds) for nbytes, seconds in timed if seconds > 0]
    return sum(n for n, _ in timed) / sum(s for _, s in timed) / 1e9 if timed else nan


def _figures(
    by_transport: _Stages, failed: Mapping[str, str], best: Mapping[str, float]
) -> tuple[Any, ...]:
    """Return the fields of a `Cell` after reader and holder."""
    nbytes = Counter({name: sum(s.nbytes for s in by_transport[name]) for name in by_transport})
    ((transport, _),) = nbytes.most_common(1)
    gbs = _gbs(by_transport[transport])
    share = gbs / best[transport] if best[transport] else nan
    stages = [stage for transport_stages in by_transport.values() for stage in transport_stages]
    text = ", ".join(f"{name} {format_bytes(n)}" for name, n in nbytes.most_common())
    waited_s = sum(stage.waited_s for stage in stages)
    reasons = [f"{name}: {why.removeprefix(f'{name}: ')}" for name, why in failed.items()]
    fallback = "; ".join(reasons[:_REASONS])
    return transport, gbs, share, nbytes.total(), len(stages), text, waited_s, fallback


def bars(runs: Sequence[Run]) -> Chart:
    """Return the newest of the runs as bars over time, with a row for each worker.

    `runs` is sorted with the newest run first. If a few tasks have too many bars already, each task
    is drawn with a single stage for all its holders.
    """
    records = sorted((r for run in _newest(runs) for r in run.records), key=lambda r: -r.start_s)
    moved: Counter[str] = Counter()
    for record in records:
        moved[record.worker] += 1 + sum(stage.nbytes for stage in record.stages)
    workers, note = _busiest(moved)
    records = [record for record in records if record.worker in workers]
    all_records, records = records, _cut_to_limit(records)
    if {record.worker for record in records} < {*workers}:
        records = _cut_to_limit([r._replace(stages=(_merge_stages(r),)) for r in all_records])
    names = _short_names([*workers, *{s.holder for r in records for s in r.stages}])
    begun_s = records[-1].start_s if records else 0.0
    drawn = [
        bar
        for row, worker in enumerate(reversed(workers))
        for record, top, height in _place_tasks(row, (r for r in records if r.worker == worker))
        for bar in _task_bars(record, begun_s, top, height, names)
    ]
    drawn.sort(key=lambda bar: PARTS.index(bar.part))  # tasks behind their activities
    when = time.strftime(" since %H:%M:%S", time.localtime(begun_s)) if records else ": no runs yet"
    shown = [names[worker] for worker in workers]
    return Chart(f"Stages{when}{note}", shown, as_columns(drawn, Bar._fields))


def _place_tasks(
    row: int, records: Iterable[TaskRecord]
) -> Iterator[tuple[TaskRecord, float, float]]:
    """Yield a worker's tasks with the top and the height of each. Some may run concurrently."""
    lanes: list[list[TaskRecord]] = []  # without overlaps, each in the order of time
    for record in sorted(records, key=lambda record: (record.start_s, record.stop_s)):
        free = next((lane for lane in lanes if lane[-1].stop_s <= record.start_s), None)
        if free is None:
            lanes.append([record])
        else:
            free.append(record)
    height = 0.9 / max(1, len(lanes))
    for number, lane in enumerate(lanes):
        for record in lane:
            yield record, row + 0.95 - number * height, height * 0.95


def _task_bars(
    record: TaskRecord, begun_s: float, top: float, height: float, names: Mapping[str, str]
) -> Iterator[Bar]:
    """Yield a task's bar, and in front of it those of waiting, transfer and kernels."""
    third = height / 3
    task = record.name, record.block, record.error, record.stop_s
    for part, left_s, seconds, stage in _task_activities(record):
        above = max(0, PARTS.index(part) - 1) * third
        low = top - height if part == "task" else top - above - third
        rectangle = left_s - begun_s, left_s - begun_s + seconds, low, top - above
        transfer = names.get(stage.holder, stage.holder), stage.transport, stage.nbytes, seconds
        if seconds or part == "task":
            yield Bar(part, *rectangle, names[record.worker], *transfer, *task)


def _task_activities(record: TaskRecord) -> Iterator[tuple[str, float, float, Stage]]:
    """Yield a task and its activities: the part, its start, its seconds, and its stage.

    Each activity has many short intervals during a stage, drawn as one. ``waiting`` is drawn from
    the start of the stage, ``kernel`` up to the end.
    """
    start_s, itself = record.start_s, Stage("itself", "", 0)
    yield "task", start_s, record.stop_s - start_s, _merge_stages(record)
    yield "kernel", start_s, record.kernel_s, itself
    yield "transfer", start_s, record.up_s, Stage("host", "up", record.up_bytes)
    yield "kernel", start_s, record.function_s, itself
    down = Stage("host", "down", record.down_bytes)
    yield "transfer", record.stop_s - record.down_s, record.down_s, down
    for stage in record.stages:
        left_s, end_s = record.span_s(stage)
        yield "waiting", left_s, stage.waited_s, stage
        yield "transfer", left_s, stage.wire_s or 0.0, stage
        yield "kernel", max(left_s, end_s - stage.kernel_s), stage.kernel_s, stage


def _cut_to_limit(records: list[TaskRecord]) -> list[TaskRecord]:
    bars_per_stage = len(PARTS) - 1  # bars of a stage, or of all parts through a GPU
    ends = accumulate(1 + bars_per_stage * (len(r.stages) + bool(r.parts)) for r in records)
    return [r for r, end in zip(records, ends, strict=True) if end <= MOST_BARS]


def _merge_stages(record: TaskRecord) -> Stage:
    stages = record.stages
    if len(stages) == 1:
        return stages[0]
    begun_s = min((stage.begun_s for stage in stages), default=0.0)
    end_s = max((stage.begun_s + (stage.wire_s or 0.0) for stage in stages), default=0.0)
    names = ", ".join(sorted({stage.transport for stage in stages}))
    nbytes, waited_s, kernel_s = (
        sum(getattr(stage, field) for stage in stages)
        for field in ("nbytes", "waited_s", "kernel_s")
    )
    holders, wire_s = f"{len(stages)} holders", end_s - begun_s
    return Stage(holders, names, nbytes, waited_s, wire_s, begun_s, kernel_s)


def _newest(runs: Sequence[Run]) -> Iterator[Run]:
    """Yield the runs back to a long pause: longer than a second, and than all runs after it."""
    first_s, last_s = inf, -inf
    for run in runs:
        if first_s - run.stop_s > max(1.0, last_s - first_s) and first_s < inf:
            return
        first_s, last_s = min(first_s, run.start_s), max(last_s, run.stop_s)
        yield run


def _busiest(moved: Counter[str]) -> tuple[list[str], str]:
    busiest = [worker for worker, _ in moved.most_common(_MOST_WORKERS)]
    is_cut = len(busiest) < len(moved)
    note = f": the busiest {len(busiest)} of {len(moved)} workers" if is_cut else ""
    return sorted(busiest, key=natural_sort_key), note


def _short_names(workers: Iterable[str]) -> dict[str, str]:
    parted = {worker: worker.rpartition("://") for worker in workers}
    is_one = len({protocol for protocol, mark, _ in parted.values() if mark}) < 2
    return {worker: short if is_one else worker for worker, (*_, short) in parted.items()}


# --- the speed of a section over time, and the waits of its ranks

_RECENT = 10  # points that the time left is computed from


class Speeds:
    """Points in time of running sections: the step at each. Seen while a page is open."""

    def __init__(self) -> None:
        self._points: dict[tuple[str, int, int], list[tuple[float, int]]] = {}

    def add(self, run: Run) -> list[tuple[float, int]]:
        """Add the current step of a section; return its points, the first one at its start."""
        attempt = max(record.attempt for record in run.latest)
        attempt_records = [record for record in run.latest if record.attempt == attempt]
        start_s, first = min((record.start_s, record.first_step) for record in attempt_records)
        key = run.name, run.records[0].run, attempt
        points = self._points.setdefault(key, [(start_s, first)])
        if len(self._points) > MOST_SECTIONS:
            del self._points[next(iter(self._points))]
        at_s = max(record.stop_s for record in attempt_records)
        step = min(record.step for record in attempt_records)
        if at_s > points[-1][0] and step >= points[-1][1]:
            points.append((at_s, step))
        if len(points) > MOST_POINTS:
            del points[1:-1:2]
        return points


def section_of(runs: Sequence[Run]) -> Run | None:
    """Return the newest run with steps; `runs` is sorted with the newest run first."""
    return next((run for run in runs if run.all_steps or run.steps), None)


def speed_chart(run: Run | None, speeds: Speeds) -> Chart:
    """Return the speed of a section over time: steps a second between two points in time.

    The title has its steps, and while it runs its speeds and the time left.
    """
    points = [] if run is None else speeds.add(run)
    columns: Columns = {
        "seconds": [at_s - points[0][0] for at_s, _ in points[1:]],  # since the attempt's start
        "rate": [(n - before) / (s - before_s) for (before_s, before), (s, n) in pairwise(points)],
        "step": [step for _, step in points[1:]],
    }
    if run is None:
        return Chart("Steps: no section has made any yet", [], columns)
    (old_s, old), (new_s, new) = points[-_RECENT - 1 :][0], points[-1]
    rate = (new - old) / (new_s - old_s) if new > old else 0.0
    is_running = run.state == "running"
    text = pace_text(run.steps, run.all_steps, rate if is_running else 0.0, run.steps_per_s)
    if not is_running:
        text += f", {run.state}"
    elif not rate:
        text += ", no step for a while" if points[1:] else ", begun"
    return Chart(f"{run.operation}: {text}", [], columns)


def waiting_chart(run: Run | None) -> Chart:
    """Return the waits of a section's ranks for others, in their latest attempts."""
    title, latest = "Waiting by rank", () if run is None else run.latest
    longest = sorted(latest, key=lambda record: -record.waited_share)[:MOST_RANKS]
    if len(longest) < len(latest):
        title += f": the longest {len(longest)} of {len(latest)}"
    ranks = sorted(longest, key=lambda record: natural_sort_key(record.block))
    columns: Columns = {
        "rank": [record.block for record in ranks],
        "worker": [record.worker.rpartition("://")[2] for record in ranks],
        "share": [record.waited_share for record in ranks],  # of its time: 0 to 1
        "text": [waits_text(record.waited_share, record.waited_per_step_s) for record in ranks],
        "step": [record.step for record in ranks],  # so far
    }
    return Chart(title, columns["rank"], columns)
