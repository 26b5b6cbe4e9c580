"""Runs as a trace in Chrome's format, for https://ui.perfetto.dev and chrome://tracing.

Each worker is a process with three kinds of tracks: its tasks, their stages, and reads by others::

    worker A  tasks    [p2p-transpose (0, 0)                        ]
              stages      [B by cma  [wait    ][kernel]]
                              [C by cma     [wait ][kernel]         ]
    worker B  serves      [A                           ]   a flow leads from here to A's stage

A record has sums of times, not points in time. The parts of a stage are drawn one after another
from its start, and are clipped at its end. The exact figures are among each slice's arguments.
Times are of the workers' clocks.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

from dask_p2p.monitoring.records import Stage, TaskRecord

_TRACKS = ("tasks", "stages", "serves")  # kinds of a worker's tracks, from top to bottom
_MOST_TRACKS = 1000  # tracks of one kind, at most


class _Slice(NamedTuple):
    """A time span with its parts."""

    start_s: float
    stop_s: float
    name: str
    kind: str  # "task", "stage" or "serve"
    args: dict[str, Any]
    parts: tuple[tuple[str, float], ...] = ()  # names and seconds
    flow: int | None = None  # number of the flow that starts or ends at the slice


def trace(records: Iterable[TaskRecord]) -> str:
    """Return records as the JSON text of a trace.

    Times are in microseconds since the first task's start.
    """
    records = sorted(records, key=lambda record: record.start_s)
    zero_s = records[0].start_s if records else 0.0
    tracks: defaultdict[tuple[str, str], list[_Slice]] = defaultdict(list)
    flow = 0
    for record in records:
        tracks[record.worker, "tasks"].append(_task(record))
        tracks[record.worker, "stages"] += _of_parts(record)
        for stage in record.stages:
            read, served = _stage(record, stage, flow)
            tracks[record.worker, "stages"].append(read)
            tracks[stage.holder, "serves"].append(served)
            flow += 1
    # Perfetto reserves process 0 for the idle process, and requires unique thread numbers.
    numbers = {worker: n for n, worker in enumerate(sorted({worker for worker, _ in tracks}), 1)}
    events = [
        _metadata("process_name", n, n * len(_TRACKS) * _MOST_TRACKS, name=worker)
        for worker, n in numbers.items()
    ]
    for (worker, kind), slices in tracks.items():
        pid = numbers[worker]
        for lane, of_lane in enumerate(in_lanes(slices)):
            tid = (pid * len(_TRACKS) + _TRACKS.index(kind)) * _MOST_TRACKS + lane
            events.append(_metadata("thread_name", pid, tid, name=kind))
            events.append(_metadata("thread_sort_index", pid, tid, sort_index=tid))
            for slice_ in of_lane:
                events += _events(slice_, {"pid": pid, "tid": tid}, zero_s)
    origin = {"start_s": zero_s, "clock": "of each worker, in seconds since the epoch"}
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": origin})


def _task(record: TaskRecord) -> _Slice:
    args: dict[str, Any] = {
        "array": record.name,
        "shape": record.shape,
        "dtype": record.dtype,
        "bytes": record.nbytes,
        "read_bytes": sum(stage.nbytes for stage in record.stages),
        "wasted_bytes": record.wasted_bytes,
        "kernel_s": record.kernel_s,
        "epilogue_s": record.epilogue_s,
    }
    if record.parts:
        args["parts"] = record.parts
    if record.attempt:
        args |= {"attempt": record.attempt, "step": record.step, "steps": record.steps}
    if record.error:
        args["error"] = record.error
    for holder, transport, reason in record.fallbacks:
        args[f"no {transport} from {holder}"] = reason
    name = f"{record.operation} ({record.block}){' failed' if record.error else ''}"
    own = (("own blocks", record.kernel_s),)
    return _Slice(record.start_s, max(record.start_s, record.stop_s), name, "task", args, own)


def _stage(record: TaskRecord, stage: Stage, flow: int) -> tuple[_Slice, _Slice]:
    """Return the slices of the reader and of the holder."""
    start_s, stop_s = record.span_s(stage)
    args = {
        "holder": stage.holder,
        "reader": record.worker,
        "transport": stage.transport,
        "bytes": stage.nbytes,
        "waited_s": stage.waited_s,
        "wire_s": stage.wire_s,
        "kernel_s": stage.kernel_s,
    }
    parts = ("wait", stage.waited_s), ("kernel", stage.kernel_s)
    name = f"{stage.holder} by {stage.transport}"
    read = _Slice(start_s, stop_s, name, "stage", args, parts, flow)
    return read, _Slice(start_s, stop_s, f"to {record.worker}", "serve", args, (), flow)


def _of_parts(record: TaskRecord) -> list[_Slice]:
    """Return the concurrent copies and function calls of a block that `map_on_gpu` made."""
    start_s, stop_s = record.start_s, max(record.start_s, record.stop_s)
    down_s = max(start_s, stop_s - record.down_s)
    slices = [
        ("copies up", start_s, start_s + record.up_s, {"bytes": record.up_bytes}),
        ("function", start_s, start_s + record.function_s, {"parts": record.parts}),
        ("copies down", down_s, stop_s, {"bytes": record.down_bytes}),
    ]
    return [
        _Slice(begun_s, min(end_s, stop_s), name, "part of block", args)
        for name, begun_s, end_s, args in slices
        if record.parts and end_s > begun_s
    ]


def _metadata(title: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": title, "pid": pid, "tid": tid, "args": args}


def _events(slice_: _Slice, lane: dict[str, int], zero_s: float) -> Iterator[dict[str, Any]]:
    def event(name: str, start_s: float, stop_s: float, **more: Any) -> dict[str, Any]:
        ts, end = (start_s - zero_s) * 1e6, (stop_s - zero_s) * 1e6
        return {"ph": "X", "name": name, "ts": ts, "dur": end - ts, **lane, **more}

    start_s, stop_s = slice_.start_s, slice_.stop_s
    yield event(slice_.name, start_s, stop_s, cat=slice_.kind, args=slice_.args)
    at_s = start_s
    for name, seconds in slice_.parts:
        end_s = min(at_s + seconds, stop_s)
        if end_s > at_s:
            yield event(name, at_s, end_s, cat="part", args={"seconds": seconds})
            at_s = end_s
    if slice_.flow is not None:
        is_end = slice_.kind == "stage"
        at_s = (start_s + stop_s) / 2 if is_end else start_s
        flow = {"id": slice_.flow, "ts": (at_s - zero_s) * 1e6, **lane}
        how = {"ph": "f", "bp": "e"} if is_end else {"ph": "s"}
        yield {"cat": "flow", "name": "regions", **how, **flow}


_Timed = TypeVar("_Timed", TaskRecord, _Slice)


def in_lanes(timed: Iterable[_Timed]) -> list[list[_Timed]]:
    """Return time spans in few lists without overlaps, each in the order of time."""
    lanes: list[list[_Timed]] = []
    for one in sorted(timed, key=lambda one: (one.start_s, one.stop_s)):
        lane = next((lane for lane in lanes if lane[-1].stop_s <= one.start_s), None)
        if lane is None:
            lanes.append([one])
        else:
            lane.append(one)
    return lanes
