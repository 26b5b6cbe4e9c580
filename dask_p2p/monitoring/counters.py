"""What a worker has done since it started, as sums: for a monitoring system, and for the scheduler.

`COUNTERS` and `GAUGES` name all figures. A worker adds to its counters once a task, and sends them
with Dask's heartbeat; the scheduler adds up those of all workers, also of those that have left.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from typing import Any, NamedTuple

from dask_p2p.monitoring.records import Record

#: By which a worker's metrics have its counters, in Dask's heartbeat.
COUNTERS_METRIC = "dask-p2p"

_OWN = "local"  # in the place of a transport: blocks that the worker itself held

#: Of each family its values by label.
Values = dict[str, Any]


class Family(NamedTuple):
    """Values of one meaning, told apart by a label."""

    name: str  # with the unit
    label: str  # what tells them apart; empty if there is one value only
    text: str


COUNTERS = (
    Family("received_bytes", "transport", "Bytes that came from other workers and were used"),
    Family("wasted_bytes", "", "Bytes that came from other workers and had to be read again"),
    Family("wait_seconds", "transport", "Time that tasks stood still for other workers' regions"),
    Family("transfer_seconds", "transport", "Time from asking a worker until its last region came"),
    Family("kernel_seconds", "transport", "Time of kernels that put regions into place"),
    Family("copied_bytes", "direction", "Bytes of parts that went up to a GPU, or came down"),
    Family("part_seconds", "step", "Time of copies up, of the function, and of copies down"),
    Family("task_seconds", "operation", "Time of attempts at tasks, from start to end"),
    Family("tasks", "operation", "Blocks that were made"),
    Family("attempts", "operation", "Attempts at making a block, failed ones included"),
    Family("fallbacks", "transport", "Readings by another transport, as this one had failed"),
)
GAUGES = (
    Family("leased_bytes", "", "Blocks that are kept because others may be reading them"),
    Family("pinned_bytes", "", "Host memory that is pinned: of outputs that came from GPUs"),
    Family("staging_bytes", "state", "Memory for regions: packed for readers, or kept for later"),
    Family("members", "", "Members of iterate and spmd that run"),
    Family("members_steps_per_second", "", "Steps a second of all these members together"),
)


class Counters:
    """What one worker has done. Any thread may call it."""

    def __init__(self) -> None:
        self._values = _no_values()
        self._new: deque[Record] = deque()  # not counted yet: a task is not to wait for it
        self._lock = threading.Lock()

    def add(self, record: Record) -> None:
        """Count an attempt that has ended, with the next heartbeat."""
        self._new.append(record)

    def values(self) -> Values:
        """Return a copy of all values."""
        with self._lock:
            while self._new:
                _count(self._values, self._new.popleft())
            return {name: dict(by_label) for name, by_label in self._values.items()}


class Totals:
    """Sums over workers that never fall, even when a worker leaves or restarts."""

    def __init__(self) -> None:
        self._ended = _no_values()
        self._latest: dict[str, Values] = {}  # by worker

    def note(self, worker: str, values: Values) -> None:
        """Take what a worker has counted so far, in the place of what it had."""
        before = self._latest.get(worker, {})
        if any(Counter(before.get(f.name)) - Counter(values.get(f.name)) for f in COUNTERS):
            # One has fallen: the worker restarted.
            self.end(worker)
        self._latest[worker] = values

    def end(self, worker: str) -> None:
        """Note that a worker counts no further."""
        sum_into(self._ended, self._latest.pop(worker, {}))

    def values(self) -> Values:
        """Return the sums."""
        sums = _no_values()
        for values in (self._ended, *self._latest.values()):
            sum_into(sums, values)
        return sums


def _count(values: Values, record: Record) -> None:
    operation = record.operation
    values["attempts"][operation] += 1
    values["tasks"][operation] += not record.error
    values["task_seconds"][operation] += max(0.0, record.stop_s - record.start_s)
    values["wasted_bytes"][""] += record.wasted_bytes
    values["kernel_seconds"][_OWN] += record.kernel_s
    if record.parts:
        for direction in ("up", "down"):
            values["copied_bytes"][direction] += getattr(record, f"{direction}_bytes")
        for step in ("up", "function", "down"):
            values["part_seconds"][step] += getattr(record, f"{step}_s")
    for stage in record.stages:
        values["received_bytes"][stage.transport] += stage.nbytes
        values["wait_seconds"][stage.transport] += stage.waited_s
        values["transfer_seconds"][stage.transport] += stage.wire_s or 0.0
        values["kernel_seconds"][stage.transport] += stage.kernel_s
    for fallback in record.fallbacks:
        values["fallbacks"][fallback.transport] += 1


def _no_values() -> Values:
    return {family.name: Counter() for family in COUNTERS}


def sum_into(sums: Values, values: Values) -> None:
    """Add values to sums, which are Counters, of the families that these have."""
    for name in sums.keys() & values.keys():
        sums[name].update(values[name])
