"""Traces: the requirements of Perfetto, and the same figures as in the records."""

from __future__ import annotations

import json
from collections import defaultdict

import dask.array as da
import pytest

import dask_p2p
from dask_p2p.errors import InputError
from dask_p2p.monitoring.records import Fallback, Stage
from dask_p2p.monitoring.runs import RunTable, runs_of
from dask_p2p.monitoring.trace import trace
from tests.monitoring.test_records import record
from tests.support import persisted, spread

ROUNDING_US = 0.01


def checked(text):
    """The events of a trace, by phase, once they are found to be well formed."""
    data = json.loads(text)
    assert set(data) == {"traceEvents", "displayTimeUnit", "otherData"}
    events = defaultdict(list)
    for event in data["traceEvents"]:
        events[event["ph"]].append(event)
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] != "M":
            assert event["ts"] >= 0
            assert event["cat"]
    assert set(events) <= {"M", "X", "s", "f"}
    assert all(event["dur"] >= 0 for event in events["X"])
    tracks = defaultdict(list)
    for event in events["X"]:
        tracks[event["pid"], event["tid"]].append(event)
    for track in tracks.values():
        check_nesting(track)
    named = {(e["pid"], e["tid"]) for e in events["M"] if e["name"] == "thread_name"}
    assert named == set(tracks)
    assert all(pid > 0 and tid > 0 for pid, tid in named)
    assert len({tid for _, tid in named}) == len(named), "Perfetto needs unique numbers"
    check_flows(events, tracks)
    return events


def end(event):
    return event["ts"] + event["dur"]


def check_nesting(track):
    """Slices of a track lie in one another, or apart."""
    open_ = []
    for event in sorted(track, key=lambda event: (event["ts"], -event["dur"])):
        while open_ and end(open_[-1]) <= event["ts"] + ROUNDING_US:
            open_.pop()
        if open_:
            assert end(event) <= end(open_[-1]) + ROUNDING_US
            assert event["cat"] == "part"
            assert open_[-1]["cat"] != "part"
        open_.append(event)


def check_flows(events, tracks):
    """Each flow leads from a slice of a holder to the stage of its reader."""
    assert len(events["s"]) == len(events["f"])
    starts = {event["id"]: event for event in events["s"]}
    assert len(starts) == len(events["s"])
    for last in events["f"]:
        first = starts[last["id"]]
        assert first["ts"] <= last["ts"]
        assert last["bp"] == "e"
        served, stage = (around(tracks[e["pid"], e["tid"]], e["ts"]) for e in (first, last))
        assert (served["cat"], stage["cat"]) == ("serve", "stage")
        assert served["args"] == stage["args"]
        assert served["pid"] != stage["pid"]


def around(track, ts):
    (found,) = [e for e in track if e["cat"] != "part" and e["ts"] <= ts <= end(e)]
    return found


def test_a_task_and_its_stages():
    stages = (
        Stage("b", "cma", 100, 0.25, 0.5, 0.125, 0.0625),
        Stage("c", "ipc", 50, 0.125, None, 0.25, 0.125),
        Stage("b", "comm", 10, 0.0, 9.0, 0.5, 9.0),  # of a GPU, or clocks are wrong
    )
    fallback = Fallback("c", "cma", "not permitted")
    records = [
        record(1, 11.5, error="b is deaf"),
        record(0, 10.0, stages, kernel_s=0.25, fallbacks=(fallback,), nbytes=8),
        record(2, 10.5, worker="a"),  # by another thread
    ]
    events = checked(trace(records))
    names = {e["pid"]: e["args"]["name"] for e in events["M"] if e["name"] == "process_name"}
    assert sorted(names.values()) == ["a", "b", "c"]
    tasks = [event for event in events["X"] if event["cat"] == "task"]
    assert [(e["name"], e["ts"], e["dur"]) for e in tasks] == [
        ("p2p-transpose (0, 0)", 0, 1e6),
        ("p2p-transpose (1, 0) failed", 1.5e6, 1e6),
        ("p2p-transpose (2, 0)", 0.5e6, 1e6),
    ]
    assert tasks[0]["tid"] == tasks[1]["tid"] == tasks[2]["tid"] - 1
    assert tasks[1]["args"]["error"] == "b is deaf"
    assert tasks[0]["args"]["no cma from c"] == "not permitted"
    assert tasks[0]["args"]["read_bytes"] == 160
    found = [event for event in events["X"] if event["cat"] == "stage"]
    assert {(names[e["pid"]], e["name"], e["ts"], e["dur"]) for e in found} == {
        ("a", "b by cma", 125e3, 500e3),
        ("a", "c by ipc", 250e3, 250e3),
        ("a", "b by comm", 500e3, 500e3),
    }
    parts = [(e["name"], e["ts"], e["dur"]) for e in events["X"] if e["cat"] == "part"]
    assert sorted(parts) == [
        ("kernel", 375e3, 62.5e3),
        ("kernel", 375e3, 125e3),
        ("kernel", 500e3, 500e3),
        ("own blocks", 0, 250e3),
        ("wait", 125e3, 250e3),
        ("wait", 250e3, 125e3),
    ]
    assert len(events["s"]) == 3


def test_a_block_that_went_through_a_gpu():
    times = {"parts": 4, "up_bytes": 100, "up_s": 0.5, "function_s": 0.25, "down_s": 0.75}
    events = checked(trace([record(0, 10.0, **times)]))
    found = [e for e in events["X"] if e["cat"] == "part of block"]
    assert [(e["name"], e["ts"], e["dur"]) for e in found] == [
        ("function", 0, 250e3),
        ("copies down", 250e3, 750e3),
        ("copies up", 0, 500e3),
    ]
    assert found[2]["args"] == {"bytes": 100}
    (task,) = (e for e in events["X"] if e["cat"] == "task")
    assert task["args"]["parts"] == 4


def test_nothing():
    assert not any(checked(trace([])).values())


def test_what_cannot_be_written(tmp_path):
    runs = runs_of([record(0)])
    for file in (tmp_path, tmp_path / "no" / "folder", None, "with\0zero"):
        with pytest.raises(InputError, match="expected a file that can be written"):
            runs.to_trace(file)
    RunTable().to_trace(tmp_path / "none.json")
    checked((tmp_path / "none.json").read_text())


def test_the_trace_of_a_run(client, tmp_path):
    x = spread(client, da.ones((64, 48), chunks=(4, 48)))
    dask_p2p.register(client)
    persisted(client, dask_p2p.transpose(x))
    runs = dask_p2p.last_runs(client, n=1)
    runs.to_trace(tmp_path / "trace.json")
    events = checked((tmp_path / "trace.json").read_text("utf-8"))
    made = runs[0].made
    slices = defaultdict(list)
    for event in events["X"]:
        slices[event["cat"]].append(event)
    assert len(slices["task"]) == len(made) == 16
    spent_us = sum(record.stop_s - record.start_s for record in made) * 1e6
    assert sum(event["dur"] for event in slices["task"]) == pytest.approx(spent_us, abs=1)
    stages = [stage for record in made for stage in record.stages]
    for field, arg in [("nbytes", "bytes"), *((f, f) for f in ("waited_s", "wire_s", "kernel_s"))]:
        expected = sum(getattr(stage, field) for stage in stages)
        assert sum(event["args"][arg] for event in slices["stage"]) == pytest.approx(expected)
    of_part = {"wait": "waited_s", "kernel": "kernel_s", "own blocks": None}
    drawn = defaultdict(float)
    for event in slices["part"]:
        drawn[event["name"]] += event["dur"] / 1e6
    for part, field in of_part.items():
        times = [getattr(stage, field) for stage in stages] if field else [r.kernel_s for r in made]
        assert drawn[part] == pytest.approx(sum(times), rel=0.02)
