"""Reuse of host memory: memory of released outputs is kept for a while, for new outputs.

New memory is expensive: the system clears each page at its first touch, which takes a fifth of an
exchange's time. On Dask's workers, the C library returns freed memory to the system immediately.
"""

from __future__ import annotations

import weakref
from asyncio import AbstractEventLoop, TimerHandle
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from math import prod
from typing import Any

from distributed import Worker

from dask_p2p.backends.base import Queue
from dask_p2p.backends.host.first_touch import first_touch
from dask_p2p.backends.host.pinned import CANNOT_PIN, Pinned, warn_once
from dask_p2p.interprocess.buffers import Buffers, buffer_bytes
from dask_p2p.types import Array, DType

_LEAST_BYTES = 2**20  # smallest buffer to keep: allocating a smaller one is faster than a lookup
_PINNED_SHARE = 2  # at most 1 / 2 of a worker's memory limit is pinned: it cannot be swapped
_STEPS = 8  # buffer sizes between one power of two and the next


class OutputMemory(Buffers):
    """Buffers for outputs of a Dask worker, freed when none has been returned for a while.

    A worker without a memory limit keeps no buffers. A buffer is freed when it is returned while
    the worker uses more than half of its limit.
    """

    share = 16  # at most 1 / 16 of a worker's memory limit is kept

    def __init__(self, worker: Worker, retain_s: float) -> None:  # 0: keep no buffers
        super().__init__("numpy", 0)
        self._worker: Worker | None = worker  # None once closed: outputs may outlive the worker
        self._retain_s = retain_s
        self._clearing: TimerHandle | None = None

    def empty(self, shape: Sequence[int], dtype: DType, queue: Queue) -> Array:
        """Return an uninitialised array, which the queue's work will fill."""
        size_bytes = prod(shape) * dtype.itemsize
        if queue.kind != self.kind or dtype.hasobject:
            return queue.empty(shape, dtype)
        # Buffers are larger than the array, so arrays that will not be kept are allocated exactly.
        if size_bytes >= _LEAST_BYTES and self.size_of(size_bytes) <= self._most_bytes:
            return self.take(tuple(shape), dtype)
        array = queue.empty(shape, dtype)
        first_touch(array)
        return array

    def size_of(self, nbytes: int) -> int:
        # A fine step, since all pages of a buffer are touched or pinned, even unused ones.
        step_bytes = max(_LEAST_BYTES, buffer_bytes(nbytes) // 2 // _STEPS)
        return -(-nbytes // step_bytes) * step_bytes

    def _allocate(self, size_bytes: int) -> Any:
        memory = super()._allocate(size_bytes)
        first_touch(memory)
        return memory

    @property
    def _most_bytes(self) -> int:
        """Largest number of bytes to keep."""
        if self._worker is None or not self._retain_s:
            return 0
        return (self._worker.memory_manager.memory_limit or 0) // self.share

    def put_back(self, size_bytes: int, memory: Any) -> None:
        worker, most_bytes = self._worker, self._most_bytes
        if worker is None or worker.monitor.get_process_memory() > most_bytes * self.share / 2:
            return
        self.idle_limit_bytes = most_bytes
        super().put_back(size_bytes, memory)
        loop: AbstractEventLoop = worker.loop.asyncio_loop
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(self._clear_later, loop)

    def _clear_later(self, loop: AbstractEventLoop) -> None:
        if self._clearing is not None:
            self._clearing.cancel()
        self._clearing = loop.call_later(self._retain_s, self.clear)

    def close(self) -> None:
        """Free all buffers, and keep no more."""
        self._worker = None
        if self._clearing is not None:
            self._clearing.cancel()
        self.clear()


class PinnedOutputs(OutputMemory):
    """Pinned buffers for outputs that are copied from GPUs, so that copies need no staging.

    Arrays that are too small or too large to be kept are not pinned: a single use does not make up
    for the pinning. Pinned buffers have a larger limit, since pinning 8 GiB took 0.7 s on an H200's
    host, three times as long as filling them. If memory cannot be pinned, `warn` is called with
    the reason, and outputs lie in pageable memory.
    """

    share = 4

    def __init__(self, worker: Worker, retain_s: float, warn: Callable[[str], None]) -> None:
        super().__init__(worker, retain_s)
        self._warn = partial(warn_once, warn, f"worker {worker.address}")
        self._pinned: dict[int, int] = {}  # sizes by id; other threads may read at any time

    @property
    def pinned_bytes(self) -> int:
        """Bytes of all pinned memory: outputs in use, and kept buffers."""
        return sum(list(self._pinned.values()))

    def empty(self, shape: Sequence[int], dtype: DType, queue: Queue) -> Array:
        try:
            return super().empty(shape, dtype, queue)
        except Exception as exc:  # errors of the system or of CUDA, whose classes CuPy defines
            if not isinstance(exc, _TooMuchError):
                self._warn(CANNOT_PIN, f"{type(exc).__name__}: {exc}")
            return queue.empty(shape, dtype)

    def _allocate(self, size_bytes: int) -> Pinned:
        most_bytes = self._most_bytes * self.share // _PINNED_SHARE
        if self.pinned_bytes + size_bytes > most_bytes:
            self.clear()  # kept buffers of other sizes
            if self.pinned_bytes + size_bytes > most_bytes:
                raise _TooMuchError
        memory = Pinned(size_bytes)
        self._pinned[id(memory)] = size_bytes
        weakref.finalize(memory, self._pinned.pop, id(memory), None).atexit = False
        return memory


class _TooMuchError(MemoryError):
    """The limit of pinned memory is reached."""
