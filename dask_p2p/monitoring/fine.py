"""What tasks add to Dask's "fine performance metrics", and so to `performance_report`.

Dask adds up what a task's thread did, by activity. Its own activities of a task are the thread's
time on the processor and its other time, less what is told here.
"""

from __future__ import annotations

from dask_p2p.monitoring.records import Record

__all__ = ["KERNEL", "TRANSFER", "meter"]

#: Seconds for which a task stood still for other workers' regions, or copied them itself; and bytes
#: of these regions.
TRANSFER = "p2p-transfer"
#: Seconds of kernels that put regions into place, as far as the task did not wait for others then.
KERNEL = "p2p-kernel"


def meter(record: Record) -> None:
    """Tell Dask of an attempt at a task. Call it in the task's thread.

    Activities of one thread add up to its time. Kernels of a GPU run beside what the thread waits
    for, and beside each other: what there is of them beyond the thread's time is not counted.
    """
    from distributed.metrics import context_meter

    spent_s = record.stop_s - record.start_s
    waited_s = min(sum(stage.waited_s for stage in record.stages), spent_s)
    kernel_s = record.kernel_s + sum(stage.kernel_s for stage in record.stages)
    context_meter.digest_metric(KERNEL, max(0.0, min(kernel_s, spent_s - waited_s)), "seconds")
    if record.stages:
        nbytes = sum(stage.nbytes for stage in record.stages)
        context_meter.digest_metric(TRANSFER, max(0.0, waited_s), "seconds")
        context_meter.digest_metric(TRANSFER, nbytes, "bytes")
