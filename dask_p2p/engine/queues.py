"""Which queue does the work for an output block: the backend's own, or one through a GPU."""

from __future__ import annotations

from functools import partial
from math import prod

from dask_p2p.backends import Queue, backend_named
from dask_p2p.backends.device import gpu_obstacle
from dask_p2p.backends.host_through_device import HostThroughDeviceQueue, is_for_device, part_bytes
from dask_p2p.backends.pinned import warn_once
from dask_p2p.config import Options
from dask_p2p.engine.context import TaskContext, where_is
from dask_p2p.errors import NoDeviceError
from dask_p2p.plans import BlockPlan
from dask_p2p.types import DType, Kind

__all__ = ["queue_for"]


def queue_for(
    plan: BlockPlan,  # of the block
    dtype: DType,  # of its items
    kind: Kind,  # of the library of its array
    options: Options,  # the task's
    context: TaskContext | None,  # its worker's, if that has the plugin
    leave_bandwidth: bool,  # see `Backend.queue`
) -> Queue:
    """Return a new queue for an output block.

    `NoDeviceError` if the options want a GPU for it, and there is none here.
    """
    backend, nbytes = backend_named(kind), prod(plan.shape) * dtype.itemsize
    if backend.on_device or not is_for_device(options.permute_numpy, nbytes, dtype):
        return backend.queue(leave_bandwidth=leave_bandwidth)
    where = where_is(context)
    obstacle = gpu_obstacle()
    if obstacle is not None and options.permute_numpy == "auto":
        return backend.queue(leave_bandwidth=leave_bandwidth)
    if obstacle is not None:
        raise NoDeviceError(
            f"expected a GPU to permute NumPy blocks, got none: on {where} {obstacle}. Compute on "
            f"workers with GPUs, such as those of dask_p2p.local_cluster(gpus=True), or set "
            f"p2p.permute-numpy to cpu."
        )
    tell = partial(warn_once, None if context is None else context.warn, where)
    return HostThroughDeviceQueue(backend, part_bytes(options.staging_limit_bytes), tell)
