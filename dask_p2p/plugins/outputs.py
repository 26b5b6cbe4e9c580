"""Host memory of outputs that are gone, kept a while for the next ones.

New memory is dear: the system clears each page when it is touched first, which takes a fifth of an
exchange's time. Dask's workers have the C library give free memory back at once.
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
from dask_p2p.backends.first_touch import first_touch
from dask_p2p.backends.pinned import CANNOT_PIN, Pinned, warn_once
from dask_p2p.interprocess.buffers import Buffers, buffer_bytes
from dask_p2p.types import Array, DType

_LEAST_BYTES = 2**20  # less is allocated sooner than it is looked for
_PINNED_SHARE = 2  # of a worker's memory limit is pinned at most: the system cannot take that back
_STEPS = 8  # sizes of memory from one power of two to the next


class OutputMemory(Buffers):
    """Memory for outputs of Dask's worker, kept until none has come back for a while.

    None is kept where the worker has no memory limit, nor what comes back while it uses half of it.
    """

    share = 16  # at most this part of a worker's memory limit is kept

    def __init__(self, worker: Worker, retain_s: float) -> None:  # 0 for not at all
        super().__init__("numpy", 0)
        self._worker: Worker | None = worker  # None once it is closed: outputs may outlive it
        self._retain_s = retain_s
        self._clearing: TimerHandle | None = None

    def empty(self, shape: Sequence[int], dtype: DType, queue: Queue) -> Array:
        """Return an array whose values are undefined, for what the queue will do."""
        size_bytes = prod(shape) * dtype.itemsize
        if queue.kind != self.kind or dtype.hasobject:
            return queue.empty(shape, dtype)
        # Of what is not kept no more is allocated than it needs: a buffer is larger.
        if size_bytes >= _LEAST_BYTES and self.size_of(size_bytes) <= self._most_bytes:
            return self.take(tuple(shape), dtype)
        array = queue.empty(shape, dtype)
        first_touch(array)
        return array

    def size_of(self, nbytes: int) -> int:
        # All of it is there, whatever part is used: its pages are touched, or pinned, once.
        step_bytes = max(_LEAST_BYTES, buffer_bytes(nbytes) // 2 // _STEPS)
        return -(-nbytes // step_bytes) * step_bytes

    def _allocate(self, size_bytes: int) -> Any:
        memory = super()._allocate(size_bytes)
        first_touch(memory)
        return memory

    @property
    def _most_bytes(self) -> int:
        """What may be kept, as long as there is memory."""
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


class PinnedOutputs(OutputMemory):
    """The same for outputs that come from GPUs: pinned, so that copies end there.

    What is too small or too large to be kept is not pinned, which takes longer than it saves once.
    More is kept: to pin 8 GiB took 0.7 s on an H200's host, three times as long as to fill them.
    `warn` is told why memory cannot be pinned. Outputs lie in ordinary memory then.
    """

    share = 4

    def __init__(self, worker: Worker, retain_s: float, warn: Callable[[str], None]) -> None:
        super().__init__(worker, retain_s)
        self._warn = partial(warn_once, warn, f"worker {worker.address}")
        self._pinned: dict[int, int] = {}  # sizes by id; other threads may look at any time

    @property
    def pinned_bytes(self) -> int:
        """Of all memory that is pinned: of outputs, and of what is kept."""
        return sum(list(self._pinned.values()))

    def empty(self, shape: Sequence[int], dtype: DType, queue: Queue) -> Array:
        try:
            return super().empty(shape, dtype, queue)
        except Exception as exc:  # of the system, or of CUDA, whose errors have no class here
            if not isinstance(exc, _TooMuchError):
                self._warn(CANNOT_PIN, f"{type(exc).__name__}: {exc}")
            return queue.empty(shape, dtype)

    def _allocate(self, size_bytes: int) -> Pinned:
        most_bytes = self._most_bytes * self.share // _PINNED_SHARE
        if self.pinned_bytes + size_bytes > most_bytes:
            self.clear()  # what is kept in other sizes
            if self.pinned_bytes + size_bytes > most_bytes:
                raise _TooMuchError
        memory = Pinned(size_bytes)
        self._pinned[id(memory)] = size_bytes
        weakref.finalize(memory, self._pinned.pop, id(memory), None).atexit = False
        return memory


class _TooMuchError(MemoryError):
    """As much is pinned as may be."""
