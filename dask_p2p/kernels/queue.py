"""Work queues: where kernels run, in order, for one assembled block.

A queue hides what differs between host and device memory from the code that orders the work:
on a CPU everything is done when a call returns, on a GPU when the queue is synchronised.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from dask_p2p.kernels import kernel_named

__all__ = ["DeviceQueue", "HostQueue", "Queue", "queue_for"]


class Queue(Protocol):
    """An in-order queue of kernels."""

    kind: str  # of the arrays: "numpy" or "cupy"

    def empty(self, shape: Sequence[int], dtype: Any) -> Any:
        """Return a new C-ordered array of the queue's kind, its values undefined."""

    def adopt(self, array: Any) -> Any:
        """Return the array as one of the queue's kind: itself if it is."""

    def permute(self, dst: Any, src: Any, axes: Sequence[int]) -> None:
        """Do ``dst[...] = src.transpose(axes)`` after what was queued before."""

    def synchronize(self) -> None:
        """Wait until everything queued is done."""


class HostQueue:
    """NumPy: done when the call returns."""

    kind = "numpy"

    def __init__(self) -> None:
        self._kernel = kernel_named("numpy")

    def empty(self, shape: Sequence[int], dtype: Any) -> Any:
        return self._kernel.empty(shape, dtype)

    def adopt(self, array: Any) -> Any:
        return array if isinstance(array, np.ndarray) else array.get()

    def permute(self, dst: Any, src: Any, axes: Sequence[int]) -> None:
        self._kernel.permute_into(dst, src, axes)

    def synchronize(self) -> None:
        pass


class DeviceQueue:
    """CuPy: a stream of the calling thread's own.

    The stream is a non-blocking one, so that waiting for it is not waiting for whatever else
    the process runs on its GPU. What was enqueued on the null stream before, where Dask's tasks
    make their arrays, is waited for (on the device) when the queue is made.
    """

    kind = "cupy"
    _streams = threading.local()

    def __init__(self) -> None:
        import cupy

        self._cupy = cupy
        self._kernel = kernel_named("cupy")
        streams: dict[Any, Any] = self._streams.__dict__
        device = cupy.cuda.runtime.getDevice()
        if device not in streams:
            streams[device] = cupy.cuda.Stream(non_blocking=True)
        self._stream = streams[device]
        self._wait_for_null_stream()

    def empty(self, shape: Sequence[int], dtype: Any) -> Any:
        # On the null stream: a block outlives this queue, and a pool keeps the memory of a
        # stream for that stream. What the null stream still does with memory that it gave
        # back before must be over before this queue writes there.
        array = self._kernel.empty(shape, dtype)
        self._wait_for_null_stream()
        return array

    def adopt(self, array: Any) -> Any:
        if not isinstance(array, np.ndarray):
            return array
        with self._stream:
            return self._cupy.asarray(array)

    def permute(self, dst: Any, src: Any, axes: Sequence[int]) -> None:
        self._kernel.permute_into(dst, src, axes, stream=self._stream)

    def synchronize(self) -> None:
        self._stream.synchronize()

    def _wait_for_null_stream(self) -> None:
        self._stream.wait_event(self._cupy.cuda.Stream.null.record())


def queue_for(kind: str) -> Queue:
    """Return a new queue for arrays of this kind, "numpy" or "cupy"."""
    return DeviceQueue() if kind == "cupy" else HostQueue()
