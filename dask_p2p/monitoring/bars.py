"""The newest runs as bars over time."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, groupby
from operator import attrgetter
from typing import Any

from dask_p2p.monitoring.charts import Chart, as_columns, busiest, in_lanes, short_names
from dask_p2p.monitoring.records import Record, Stage
from dask_p2p.monitoring.runs import Run

__all__ = ["PARTS", "bars"]

#: What a bar may be: a whole task, or what it did for one holder.
PARTS = ("task", "waiting", "transfer", "kernel")

_MOST_BARS = 4000


def bars(runs: Sequence[Run]) -> Chart:
    """Return the newest runs as bars over time: a row a worker.

    Runs are shown from the newest back to the first pause that is longer than all that is shown by
    then, and longer than a second. Where the bars of a few tasks would be too many, a task has one
    stage for all its holders.

    Parameters
    ----------
    runs
        The newest first.

    Returns
    -------
    Chart
        Columns by `PARTS`: ``left`` and ``right`` (seconds since the first task shown), ``top`` and
        ``bottom`` (row 0 is the first worker), ``worker``, ``holder``, ``transport``, ``nbytes``,
        ``seconds``, ``name`` and ``block`` of the output, ``error``, and ``stop_s`` of the task
        (since the epoch). ``waiting`` begins where reading began, ``kernel`` ends where the stage
        ends: the pieces of which they are made lie between.
    """
    records = sorted((r for run in _newest(runs) for r in run.records), key=lambda r: -r.start_s)
    moved: Counter[str] = Counter()
    for record in records:
        moved[record.worker] += 1 + sum(stage.nbytes for stage in record.stages)
    shown, note = busiest(moved)
    row = {worker: number for number, worker in enumerate(shown)}
    kept = _bounded([record for record in records if record.worker in row])
    names = short_names([*shown, *{s.holder for r in kept for s in r.stages}])
    begun_s = kept[-1].start_s if kept else 0.0
    drawn: dict[str, list[tuple[Any, ...]]] = {part: [] for part in PARTS}
    by_worker = attrgetter("worker")
    for worker, of_worker in groupby(sorted(kept, key=by_worker), by_worker):
        lanes = in_lanes(of_worker)  # tasks of one worker may run at once
        for lane, of_lane in enumerate(lanes):
            height = 0.9 / len(lanes)
            low = row[worker] - 0.45 + lane * height
            for record in of_lane:
                for part, bar in _bars_of(record, begun_s, low, height * 0.95, names):
                    drawn[part].append(bar)
    when = time.strftime(" from %H:%M:%S", time.localtime(begun_s)) if kept else ": no runs yet"
    columns = {part: as_columns(drawn[part], _BAR) for part in PARTS}
    return Chart(f"Stages{when}{note}", [names[worker] for worker in shown], columns)


def _bounded(records: list[Record]) -> list[Record]:
    """Return the first of them; with one stage each, if some workers would not be there else."""
    kept = _first(records)
    if {record.worker for record in kept} == {record.worker for record in records}:
        return kept
    return _first([_merged(record) for record in records])


def _first(records: list[Record]) -> list[Record]:
    parts = len(PARTS) - 1
    ends = accumulate(1 + parts * len(record.stages) for record in records)
    return [r for r, end in zip(records, ends, strict=True) if end <= _MOST_BARS]


def _merged(record: Record) -> Record:
    stages = record.stages
    if len(stages) < 2:
        return record
    begun_s = min(stage.begun_s for stage in stages)
    one = Stage(
        holder=f"{len(stages)} holders",
        transport=", ".join(sorted({stage.transport for stage in stages})),
        nbytes=sum(stage.nbytes for stage in stages),
        waited_s=sum(stage.waited_s for stage in stages),
        wire_s=max(stage.begun_s + (stage.wire_s or 0.0) for stage in stages) - begun_s,
        begun_s=begun_s,
        kernel_s=sum(stage.kernel_s for stage in stages),
    )
    return record._replace(stages=(one,))


def _newest(runs: Sequence[Run]) -> list[Run]:
    shown: list[Run] = []
    first_s = last_s = 0.0
    for run in runs:
        if not shown:
            first_s, last_s = run.start_s, run.stop_s
        elif first_s - run.stop_s > max(1.0, last_s - first_s):
            break
        first_s, last_s = min(first_s, run.start_s), max(last_s, run.stop_s)
        shown.append(run)
    return shown


_BAR = (
    *("left", "right", "bottom", "top", "worker", "holder", "transport", "nbytes", "seconds"),
    *("name", "block", "error", "stop_s"),
)


def _bars_of(
    record: Record, begun_s: float, low: float, height: float, names: Mapping[str, str]
) -> Iterable[tuple[str, tuple[Any, ...]]]:
    """Yield a task's bars: waiting, transfer and kernels one above the other, in front of it."""
    at_s, third = record.start_s - begun_s, height / 3
    task = record.name, record.block, record.error, record.stop_s
    own = Stage("itself", "", 0)

    def bar(part: str, left: float, seconds: float, stage: Stage = own) -> tuple[str, Any]:
        bottom = low + max(PARTS.index(part) - 1, 0) * third
        top = low + height if part == "task" else bottom + third
        place = (left, left + seconds, bottom, top, names[record.worker])
        what = (names.get(stage.holder, stage.holder), stage.transport, stage.nbytes, seconds)
        return part, (*place, *what, *task)

    yield bar("task", at_s, record.stop_s - record.start_s)
    if record.kernel_s:
        yield bar("kernel", at_s, record.kernel_s)
    for stage in record.stages:
        left_s, end_s = (moment_s - begun_s for moment_s in record.span_s(stage))
        if stage.waited_s:
            yield bar("waiting", left_s, stage.waited_s, stage)
        if stage.wire_s:
            yield bar("transfer", left_s, stage.wire_s, stage)
        if stage.kernel_s:
            yield bar("kernel", max(left_s, end_s - stage.kernel_s), stage.kernel_s, stage)
