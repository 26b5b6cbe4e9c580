"""Sums of what workers do, without a cluster."""

from __future__ import annotations

from dask_p2p.monitoring.metrics import COUNTERS, GAUGES, Counters, Totals
from dask_p2p.monitoring.records import Fallback, Stage
from tests.monitoring.test_records import record


def test_attempts_are_counted():
    counters = Counters()
    stages = (Stage("b", "cma", 100, 0.5, 0.75, 0.0, 0.125), Stage("c", "ipc", 50, 1.0))
    counters.add(record(0, 1.0, stages, fallbacks=(Fallback("c", "cma", "why"),), kernel_s=0.25))
    counters.add(record(0, 1.0, stages[:1], name="p2p-rechunk-0123456789abcdef0123456789abcdef"))
    counters.add(record(1, 1.0, error="why", wasted_bytes=7))
    of_parts = {"up_bytes": 8, "down_bytes": 4, "up_s": 0.5, "function_s": 0.25, "down_s": 0.125}
    counters.add(record(0, name="p2p-on-gpu-0123456789abcdef0123456789abcdef", parts=2, **of_parts))
    assert counters.values() == {
        "received_bytes": {"cma": 200, "ipc": 50},
        "wasted_bytes": {"": 7},
        "wait_seconds": {"cma": 1.0, "ipc": 1.0},
        "transfer_seconds": {"cma": 1.5, "ipc": 0.0},
        "kernel_seconds": {"local": 0.25, "cma": 0.25, "ipc": 0.0},
        "copied_bytes": {"up": 8, "down": 4},
        "part_seconds": {"up": 0.5, "function": 0.25, "down": 0.125},
        "task_seconds": {"p2p-transpose": 2.0, "p2p-rechunk": 1.0, "p2p-on-gpu": 1.0},
        "tasks": {"p2p-transpose": 1, "p2p-rechunk": 1, "p2p-on-gpu": 1},
        "attempts": {"p2p-transpose": 2, "p2p-rechunk": 1, "p2p-on-gpu": 1},
        "fallbacks": {"cma": 1},
    }
    assert [*counters.values()] == [family.name for family in COUNTERS]


def test_sums_never_fall():
    totals = Totals()
    sums = []

    def record(worker, cma):
        totals.record(worker, {"received_bytes": {"cma": cma}, "leased_bytes": {"": 1}})
        sums.append(totals.values()["received_bytes"]["cma"])

    record("a", 100)
    record("b", 50)
    record("a", 120)
    totals.end("a")
    totals.end("a")
    record("b", 60)
    record("a", 5)  # a new one at its address
    record("b", 10)  # whose plugin was taken off, and put on again
    totals.record("b", {})
    assert sums == [100, 150, 170, 180, 185, 195]
    assert totals.values()["received_bytes"]["cma"] == 195
    assert not totals.values().keys() & {family.name for family in GAUGES}
