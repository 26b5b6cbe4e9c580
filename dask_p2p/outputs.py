"""Host memory of outputs that are gone, kept a while for the next ones.

New memory is dear: the system clears each page when it is touched first, which takes a fifth of an
exchange's time. Dask's workers have the C library give free memory back at once.
"""

from __future__ import annotations

from asyncio import AbstractEventLoop, TimerHandle
from collections.abc import Sequence
from contextlib import suppress
from math import prod
from typing import Any

from distributed import Worker

from dask_p2p.backends.base import Queue
from dask_p2p.transports.buffers import Buffers, buffer_bytes
from dask_p2p.types import Array, DType

__all__ = ["OutputMemory"]

_LEAST_BYTES = 2**20  # less is allocated sooner than it is looked for
_SHARE = 16  # at most this part of a worker's memory limit is kept


class OutputMemory(Buffers):
    """Memory for outputs, kept until none has come back for a while.

    None is kept where the worker has no memory limit, nor what comes back while it uses half of it.

    Parameters
    ----------
    worker
        Dask's.
    retain_s
        How long it is kept; 0 for not at all.
    """

    def __init__(self, worker: Worker, retain_s: float) -> None:
        super().__init__("numpy", 0)
        self._worker: Worker | None = worker  # None once it is closed: outputs may outlive it
        self._retain_s = retain_s
        self._clearing: TimerHandle | None = None

    def empty(self, shape: Sequence[int], dtype: DType, queue: Queue) -> Array:
        """Return an array whose values are undefined, for what the queue will do."""
        size_bytes = prod(shape) * dtype.itemsize
        # Of what is not kept no more is allocated than it needs: a buffer is up to twice as large.
        is_kept = size_bytes >= _LEAST_BYTES and buffer_bytes(size_bytes) <= self._most_bytes
        if queue.kind != self.kind or dtype.hasobject or not is_kept:
            return queue.empty(shape, dtype)
        return self.take(tuple(shape), dtype)

    @property
    def _most_bytes(self) -> int:
        """What may be kept, as long as there is memory."""
        if self._worker is None or not self._retain_s:
            return 0
        return (self._worker.memory_manager.memory_limit or 0) // _SHARE

    def _put_back(self, size_bytes: int, memory: Any) -> None:
        worker, most_bytes = self._worker, self._most_bytes
        if worker is None or worker.monitor.get_process_memory() > most_bytes * _SHARE / 2:
            return
        self.idle_limit_bytes = most_bytes
        super()._put_back(size_bytes, memory)
        loop: AbstractEventLoop = worker.loop.asyncio_loop
        with suppress(RuntimeError):  # it is closed
            loop.call_soon_threadsafe(self._clear_later, loop)

    def _clear_later(self, loop: AbstractEventLoop) -> None:
        if self._clearing is not None:
            self._clearing.cancel()
        self._clearing = loop.call_later(self._retain_s, self.clear)

    def close(self) -> None:
        """Keep nothing any more."""
        self._worker = None
        if self._clearing is not None:
            self._clearing.cancel()
        self.clear()
