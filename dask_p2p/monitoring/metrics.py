"""Counters of a worker's activity since its start, for the scheduler and for monitoring systems.

`COUNTERS` and `GAUGES` list all metrics. A worker updates its counters once per task, and sends
them with Dask's heartbeat. The scheduler sums them over all workers, present and departed.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import dask
from distributed.metrics import context_meter

from dask_p2p.errors import install_command
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


# The package's metrics on the page ``/metrics`` of Dask's workers and schedulers.
#
# Dask makes this page from one registry per process. The package registers one collector for
# workers and one for schedulers. Like Dask's own, they return the metrics of the server whose page
# is requested. Without the package prometheus_client, Dask has no such page, and this module logs
# the command that installs it.

_PREFIXES = {"worker": "p2p", "scheduler": "p2p_cluster"}
registered: WeakKeyDictionary[Any, Callable[[], Values]] = WeakKeyDictionary()  # by server


def register(server: Any, kind: str, read: Callable[[], Values]) -> None:
    """Add the package's metrics to the page of a server of this kind: "worker" or "scheduler".

    `read` returns the values of `COUNTERS` and `GAUGES`, or an empty dict. It is called on the
    event loop.
    """
    try:
        add_collector(kind)
    except ImportError:
        command = install_command("metrics")
        logger = logging.getLogger(f"distributed.{kind}")  # Dask's logger for the server
        logger.info("dask_p2p: no metrics, which need prometheus_client. Run: %s", command)
        return
    registered[server] = read


def unregister(server: Any) -> None:
    """Remove the package's metrics from a server's page. Idempotent."""
    registered.pop(server, None)


@cache  # the registry accepts a collector once
def add_collector(kind: str) -> None:
    """Register a collector for the workers or schedulers of this process."""
    from prometheus_client import REGISTRY

    REGISTRY.register(Collector(kind))


class Collector:
    """A Prometheus collector of the package's metrics, for workers or for schedulers."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def describe(self) -> list[Any]:
        return []  # otherwise the registry would call `collect`

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        server = _page_server(self._kind)
        values = registered[server]() if server in registered else {}
        if not values:
            return
        namespace = dask.config.get("distributed.dashboard.prometheus.namespace", "dask")
        prefix = "_".join(filter(None, [namespace, _PREFIXES[self._kind]]))
        for family in (*COUNTERS, *GAUGES):
            make = CounterMetricFamily if family in COUNTERS else GaugeMetricFamily
            labels = [family.label] if family.label else []
            metric = make(f"{prefix}_{family.name}", family.text, labels=labels)
            for label, value in values.get(family.name, {}).items():
                metric.add_metric([label] if labels else [], value)
            yield metric


def _page_server(kind: str) -> Any:
    """Return the server of this process whose page is being made, or None.

    Returns None also if this release of Dask makes the page in another way. An error would remove
    Dask's own metrics too.
    """
    try:
        handler = import_module(f"distributed.http.{kind}.prometheus.core").PrometheusHandler
    except (ImportError, AttributeError):
        return None
    collectors = getattr(handler, "_collectors", None) or [getattr(handler, "_collector", None)]
    return getattr(collectors[0], "server", None)


# Metrics of tasks for Dask's own channels: "fine performance metrics", and times by action.
#
# Fine performance metrics are the times of a task's thread by activity. To the activities reported
# here, Dask adds the remaining time of the thread, on the processor and off it. Sums of the times
# by action are in a `performance_report`, on the dashboard, and in Dask's own Prometheus metrics.

#: Seconds that a task waited for other workers' regions, or copied them; and their bytes.
TRANSFER = "p2p-transfer"
#: Seconds of kernels that write regions to the output, without the task's waiting time.
KERNEL = "p2p-kernel"
#: Bytes of parts copied to a GPU and back.
COPY = "p2p-copy"


def meter(record: TaskRecord) -> None:
    """Report an attempt at a task to Dask. Call it in the task's thread.

    The activities of a thread add up to its time. GPU kernels run concurrently with the thread and
    with each other, so their time is counted up to the thread's remaining time.
    """
    own_s = record.stop_s - record.start_s - record.waited_s
    kernel_s = record.kernel_s + sum(stage.kernel_s for stage in record.stages)
    context_meter.digest_metric(KERNEL, max(0.0, min(kernel_s, own_s)), "seconds")
    if record.parts:
        context_meter.digest_metric(COPY, record.up_bytes + record.down_bytes, "bytes")
    if record.stages:
        nbytes = sum(stage.nbytes for stage in record.stages)
        context_meter.digest_metric(TRANSFER, record.waited_s, "seconds")
        context_meter.digest_metric(TRANSFER, nbytes, "bytes")


def record_transfer(worker: Any, record: TaskRecord) -> None:
    """Report a task's wait for other workers' regions to Dask, as time of transfer.

    Dask also counts the whole task as computing time. The record is that of a successful attempt,
    whose task has not returned yet.
    """
    waited_s = record.waited_s
    task = worker.state.tasks.get(record.key) if waited_s else None
    if task is None:
        return
    begun_s = min(stage.begun_s for stage in record.stages)
    start_s = min(record.start_s + begun_s, record.stop_s - waited_s) + worker.scheduler_delay
    span = {"action": "transfer", "start": start_s, "stop": start_s + waited_s}
    task.startstops.append(span)
