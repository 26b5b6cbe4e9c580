"""Metrics of tasks for Dask's own channels: "fine performance metrics", and times by action.

Fine performance metrics are the times of a task's thread by activity. To the activities reported
here, Dask adds the remaining time of the thread, on the processor and off it. Sums of the times by
action are in a `performance_report`, on the dashboard, and in Dask's own Prometheus metrics.
"""

from __future__ import annotations

from typing import Any

from distributed.metrics import context_meter

from dask_p2p.monitoring.records import TaskRecord

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
