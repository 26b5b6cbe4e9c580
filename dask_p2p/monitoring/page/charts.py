"""What the page draws, as plain columns: a matrix of links, and the newest runs as bars over time.

Nothing here needs bokeh.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from math import inf, nan
from typing import Any, NamedTuple, TypeAlias

from dask.utils import format_bytes, natural_sort_key

from dask_p2p.monitoring.records import Record, Stage
from dask_p2p.monitoring.runs import Run
from dask_p2p.monitoring.trace import in_lanes

Columns: TypeAlias = dict[str, list[Any]]
_Stages: TypeAlias = dict[str, list[Stage]]  # by transport

#: What a bar may be: a whole task, or what it did for one holder.
PARTS = ("task", "waiting", "transfer", "kernel")

_MOST_WORKERS = 64  # of a chart: those that move most
_MOST_BARS = 4000
_REASONS = 3  # of fallbacks, that a cell tells


class Chart(NamedTuple):
    """What is drawn."""

    title: str
    workers: list[str]  # in their order, by short names
    columns: Columns


class Cell(NamedTuple):
    """What one worker read from another."""

    reader: str
    holder: str
    transport: str  # that brought most
    gbs: float  # GB (1e9 bytes) a second by it; nan where nothing was timed
    share: float  # of the best link of the same transport: 0 to 1, or nan
    nbytes: int  # by all transports
    tasks: int
    text: str  # bytes by each transport
    waited_s: float  # for which tasks of the reader stood still
    fallback: str  # empty, or which transports failed and why


class Bar(NamedTuple):
    """A task, or what it did for one holder."""

    part: str  # one of `PARTS`
    left: float  # seconds since the first task shown
    right: float
    bottom: float  # the last worker's row is from 0 to 1, those of the others are above it
    top: float
    worker: str
    holder: str
    transport: str
    nbytes: int
    seconds: float
    name: str  # of the output array
    block: str
    error: str
    stop_s: float  # of the task, since the epoch


def as_columns(rows: Sequence[tuple[Any, ...]], names: Sequence[str]) -> Columns:
    """Return a table, given by rows, by columns of these names."""
    return {name: [row[i] for row in rows] for i, name in enumerate(names)}


def links(records: Iterable[Record], workers: Iterable[str] = ()) -> Chart:
    """Return a matrix of workers, also of `workers` that moved nothing: a `Cell` for each pair."""
    read: defaultdict[tuple[str, str], _Stages] = defaultdict(lambda: defaultdict(list))
    failed: defaultdict[tuple[str, str], dict[str, str]] = defaultdict(dict)  # why, by transport
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
            best[transport] = max(best[transport], _gbs(stages))  # nan is never more
    shown, note = _busiest(moved)
    names = _short_names(shown)
    found = [
        Cell(names[reader], names[holder], *_figures(by_transport, failed[reader, holder], best))
        for (reader, holder), by_transport in read.items()
        if {reader, holder} <= names.keys()
    ]
    title = f"Links{note if read else ': nothing has moved yet'}"
    return Chart(title, [*names.values()], as_columns(found, Cell._fields))


def _gbs(stages: Iterable[Stage]) -> float:
    timed = [(s.nbytes, s.kernel_s if s.wire_s is None else s.wire_s) for s in stages]
    timed = [(nbytes, seconds) for nbytes, seconds in timed if seconds > 0]
    return sum(n for n, _ in timed) / sum(s for _, s in timed) / 1e9 if timed else nan


def _figures(
    by_transport: _Stages, failed: Mapping[str, str], best: Mapping[str, float]
) -> tuple[Any, ...]:
    """Return a `Cell` but for its reader and holder."""
    nbytes = Counter({name: sum(s.nbytes for s in those) for name, those in by_transport.items()})
    ((transport, _),) = nbytes.most_common(1)
    gbs = _gbs(by_transport[transport])
    share = gbs / best[transport] if best[transport] else nan
    stages = [stage for those in by_transport.values() for stage in those]
    text = ", ".join(f"{name} {format_bytes(n)}" for name, n in nbytes.most_common())
    waited_s = sum(stage.waited_s for stage in stages)
    reasons = [f"{name}: {why.removeprefix(f'{name}: ')}" for name, why in failed.items()]
    fallback = "; ".join(reasons[:_REASONS])
    return transport, gbs, share, nbytes.total(), len(stages), text, waited_s, fallback


def bars(runs: Sequence[Run]) -> Chart:
    """Return the newest runs, which come first, as bars over time: a row a worker.

    Where the bars of a few tasks would be too many, a task has one stage for all its holders.
    """
    records = sorted((r for run in _newest(runs) for r in run.records), key=lambda r: -r.start_s)
    moved: Counter[str] = Counter()
    for record in records:
        moved[record.worker] += 1 + sum(stage.nbytes for stage in record.stages)
    workers, note = _busiest(moved)
    records = [record for record in records if record.worker in workers]
    kept = _first(records)
    if {record.worker for record in kept} < {*workers}:
        kept = _first([r._replace(stages=(_all_of(r),)) for r in records])
    names = _short_names([*workers, *{s.holder for r in kept for s in r.stages}])
    begun_s = kept[-1].start_s if kept else 0.0
    drawn = [
        bar
        for row, worker in enumerate(reversed(workers))
        for record, top, height in _in_row(row, (r for r in kept if r.worker == worker))
        for bar in _bars_of(record, begun_s, top, height, names)
    ]
    drawn.sort(key=lambda bar: PARTS.index(bar.part))  # tasks behind what they did
    when = time.strftime(" from %H:%M:%S", time.localtime(begun_s)) if kept else ": no runs yet"
    shown = [names[worker] for worker in workers]
    return Chart(f"Stages{when}{note}", shown, as_columns(drawn, Bar._fields))


def _in_row(row: int, records: Iterable[Record]) -> Iterator[tuple[Record, float, float]]:
    """Yield a worker's tasks with the top and the height of each: some may run at once."""
    lanes = in_lanes(records)
    height = 0.9 / max(1, len(lanes))
    for lane, of_lane in enumerate(lanes):
        for record in of_lane:
            yield record, row + 0.95 - lane * height, height * 0.95


def _bars_of(
    record: Record, begun_s: float, top: float, height: float, names: Mapping[str, str]
) -> Iterator[Bar]:
    """Yield a task's bars: waiting, transfer and kernels one below the other, in front of it."""
    third = height / 3
    task = record.name, record.block, record.error, record.stop_s
    for part, left_s, seconds, of in _parts_of(record):
        above = max(0, PARTS.index(part) - 1) * third
        low = top - height if part == "task" else top - above - third
        place = left_s - begun_s, left_s - begun_s + seconds, low, top - above
        what = names.get(of.holder, of.holder), of.transport, of.nbytes, seconds
        if seconds or part == "task":
            yield Bar(part, *place, names[record.worker], *what, *task)


def _parts_of(record: Record) -> Iterator[tuple[str, float, float, Stage]]:
    """Yield a task and what it did: the part, when it began, its seconds, and for whom it was.

    ``waiting`` begins where reading began, ``kernel`` ends where the stage ends: the pieces of
    which they are made lie between.
    """
    start_s, own = record.start_s, Stage("itself", "", 0)
    yield "task", start_s, record.stop_s - start_s, _all_of(record)
    yield "kernel", start_s, record.kernel_s, own
    yield "transfer", start_s, record.up_s, Stage("host", "up", record.up_bytes)
    yield "kernel", start_s, record.function_s, own
    down = Stage("host", "down", record.down_bytes)
    yield "transfer", record.stop_s - record.down_s, record.down_s, down
    for stage in record.stages:
        left_s, end_s = record.span_s(stage)
        yield "waiting", left_s, stage.waited_s, stage
        yield "transfer", left_s, stage.wire_s or 0.0, stage
        yield "kernel", max(left_s, end_s - stage.kernel_s), stage.kernel_s, stage


def _first(records: list[Record]) -> list[Record]:
    """Return as many as there may be bars."""
    most = len(PARTS) - 1  # of a stage, or of all parts through a GPU
    ends = accumulate(1 + most * (len(r.stages) + bool(r.parts)) for r in records)
    return [r for r, end in zip(records, ends, strict=True) if end <= _MOST_BARS]


def _all_of(record: Record) -> Stage:
    """Return all that came to a task as if it had been one stage."""
    stages = record.stages
    if len(stages) == 1:
        return stages[0]
    begun_s = min((stage.begun_s for stage in stages), default=0.0)
    end_s = max((stage.begun_s + (stage.wire_s or 0.0) for stage in stages), default=0.0)
    names = ", ".join(sorted({stage.transport for stage in stages}))
    nbytes, waited_s, kernel_s = (
        sum(getattr(stage, of) for stage in stages) for of in ("nbytes", "waited_s", "kernel_s")
    )
    holders, wire_s = f"{len(stages)} holders", end_s - begun_s
    return Stage(holders, names, nbytes, waited_s, wire_s, begun_s, kernel_s)


def _newest(runs: Sequence[Run]) -> Iterator[Run]:
    """Yield the runs back to a pause longer than a second, and than all that comes after it."""
    first_s, last_s = inf, -inf
    for run in runs:
        if first_s - run.stop_s > max(1.0, last_s - first_s) and first_s < inf:
            return
        first_s, last_s = min(first_s, run.start_s), max(last_s, run.stop_s)
        yield run


def _busiest(moved: Counter[str]) -> tuple[list[str], str]:
    """Return the workers to show, in their order, and what a title has to say of it."""
    most = [worker for worker, _ in moved.most_common(_MOST_WORKERS)]
    note = f": the busiest {len(most)} of {len(moved)} workers" if len(most) < len(moved) else ""
    return sorted(most, key=natural_sort_key), note


def _short_names(workers: Iterable[str]) -> dict[str, str]:
    """Return addresses as people read them: without the protocol, where all have the same."""
    parted = {worker: worker.rpartition("://") for worker in workers}
    is_one = len({protocol for protocol, mark, _ in parted.values() if mark}) < 2
    return {worker: short if is_one else worker for worker, (*_, short) in parted.items()}
