"""Counters of a worker's activity since its start, for the scheduler and for monitoring systems.

`COUNTERS` and `GAUGES` list all metrics. A worker updates its counters once per task, and sends
them with Dask's heartbeat. The scheduler sums them over all workers, present and departed.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from typing import Any, NamedTuple

from dask_p2p.monitoring.records import TaskRecord

#: Name of the counters in a worker's metrics, in Dask's heartbeat.
COUNTERS_METRIC = "dask-p2p"
#: Name of a metric: the memory of a worker's GPU; 0 without one, or if host memory extends it.
DEVICE_METRIC = "dask-p2p-device-bytes"

_OWN = "local"  # label of the worker's own blocks, instead of a transport

#: Values by family and label.
Values = dict[str, Any]


class Family(NamedTuple):
    """A metric, with a value for each value of its label."""

    name: str  # with the unit
    label: str  # name of the label; empty for a single value
    text: str


COUNTERS = (
    Family("received_bytes", "transport", "Bytes received from other workers and used"),
    Family("wasted_bytes", "", "Bytes received from other workers that had to be read again"),
    Family("wait_seconds", "transport", "Time that tasks waited for other workers' regions"),
    Family("transfer_seconds", "transport", "Time from a request to its last region's arrival"),
    Family("kernel_seconds", "transport", "Time of kernels that write regions to the output"),
    Family("copied_bytes", "direction", "Bytes of parts copied up to a GPU, or down from it"),
    Family("part_seconds", "step", "Time of copies up, of the function, and of copies down"),
    Family("task_seconds", "operation", "Time of attempts at tasks, from start to end"),
    Family("tasks", "operation", "Completed blocks"),
    Family("attempts", "operation", "Attempts at making a block, failed ones included"),
    Family("fallbacks", "transport", "Reads by another transport because this one had failed"),
)
GAUGES = (
    Family("leased_bytes", "", "Blocks that are kept because others may be reading them"),
    Family("pinned_bytes", "", "Pinned host memory of outputs that were copied from GPUs"),
    Family("staging_bytes", "state", "Memory for regions: packed for readers, or kept for reuse"),
    Family("ranks", "", "Running ranks of iterate and spmd"),
    Family("ranks_steps_per_second", "", "Total steps per second of these ranks"),
)


class Counters:
    """The counters of one worker. Any thread may use them."""

    def __init__(self) -> None:
        self._values = _no_values()
        self._new: deque[TaskRecord] = deque()  # records to be counted later, outside of the task
        self._lock = threading.Lock()

    def add(self, record: TaskRecord) -> None:
        """Add a finished attempt, to be counted at the next heartbeat."""
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

    def record(self, worker: str, values: Values) -> None:
        """Replace the values of a worker by newer ones."""
        before = self._latest.get(worker, {})
        if any(Counter(before.get(f.name)) - Counter(values.get(f.name)) for f in COUNTERS):
            # A counter has fallen: the worker restarted.
            self.end(worker)
        self._latest[worker] = values

    def end(self, worker: str) -> None:
        """Add the last values of a worker that has left or restarted to the sums."""
        sum_into(self._ended, self._latest.pop(worker, {}))

    def values(self) -> Values:
        """Return the sums."""
        sums = _no_values()
        for values in (self._ended, *self._latest.values()):
            sum_into(sums, values)
        return sums


def _count(values: Values, record: TaskRecord) -> None:
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
    """Add values to sums (`collections.Counter` by family), for the families in the sums."""
    for name in sums.keys() & values.keys():
        sums[name].update(values[name])
