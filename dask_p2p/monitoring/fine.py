"""What tasks tell Dask's own channels: "fine performance metrics", and times by action.

For the first Dask adds up what a task's thread did, by activity. Its own activities of a task are
the thread's time on the processor and its other time, less what is told here. Of the second a
`performance_report`, the dashboard and Dask's own figures for Prometheus have the sums.
"""

from __future__ import annotations

from typing import Any

from distributed.metrics import context_meter

from dask_p2p.monitoring.records import Record

#: Seconds for which a task stood still for other workers' regions, or copied them itself; and bytes
#: of these regions.
TRANSFER = "p2p-transfer"
#: Seconds of kernels that put regions into place, as far as the task did not wait for others then.
KERNEL = "p2p-kernel"
#: Bytes of parts that went to a GPU, and came back.
COPY = "p2p-copy"


def meter(record: Record) -> None:
    """Tell Dask of an attempt at a task. Call it in the task's thread.

    Activities of one thread add up to its time. Kernels of a GPU run at the same time as
    the thread and as each other: what exceeds the thread's time is not counted.
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


def note_transfer(worker: Any, record: Record) -> None:
    """Have Dask count what a task waited for other workers' regions as time of transfer.

    It counts the whole task as time of computing as well. The record is of an attempt that has made
    its block; the task has not returned yet.
    """
    waited_s = record.waited_s
    task = worker.state.tasks.get(record.key) if waited_s else None
    if task is None:
        return
    begun_s = min(stage.begun_s for stage in record.stages)
    start_s = min(record.start_s + begun_s, record.stop_s - waited_s) + worker.scheduler_delay
    span = {"action": "transfer", "start": start_s, "stop": start_s + waited_s}
    task.startstops.append(span)
