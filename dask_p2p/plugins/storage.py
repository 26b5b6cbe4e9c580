"""Reads of blocks in a worker's store, without moving them between its levels.

``worker.data[key]`` brings a spilled block back into memory, and spills others to make room. When
two threads do so at the same time, one of them gets a `KeyError`. So readers look into each level
of the store in turn, and change none of them.

A NumPy block on disk is memory-mapped: a read of a region loads only its pages. Dask may remove the
file at any time; the pages remain until the array is released. Blocks that Dask has compressed, and
Python objects, are read as a whole.

dask-cuda spills CuPy blocks in Dask's serialised form: a header, and the bytes in host memory. They
are read there like NumPy blocks, region by region, and take no memory of their GPU.
"""

from __future__ import annotations

import mmap
import os
import sys
import weakref
from asyncio import AbstractEventLoop, TimerHandle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from math import prod
from typing import Any

import numpy as np
from distributed import Worker
from distributed.spill import SpillBuffer
from zict import Buffer, Cache, File, Func

from dask_p2p.backends import Queue
from dask_p2p.backends.device import private_stream
from dask_p2p.backends.host_memory import CANNOT_PIN, Pinned, bases, first_touch, warn_once
from dask_p2p.transports.buffers import Buffers, buffer_bytes
from dask_p2p.types import Array, DType, Key


def find_in_memory(data: Any, key: Key) -> Any:
    """Return a block that is not spilled; raise `KeyError` if there is none.

    A CuPy block counts as not spilled only in GPU memory.
    """
    for level in _memory_levels(data):
        try:
            block = level[key]
        except KeyError:
            continue
        if not _is_serialized(block):
            return block
    raise KeyError(key)


def holds(data: Any, key: Key) -> bool:
    """Return whether a store has a block, on any level.

    In dask-cuda's store, ``key in data`` would bring the block back to the GPU.
    """
    return any(key in level for level in (*_memory_levels(data), *_slow_levels(data)))


def is_spilled(data: Any, key: Key) -> bool:
    """Return whether a store has a block, but spilled."""
    if isinstance(data, SpillBuffer):
        return key not in data.memory and key in data.disk  # a lookup would mark it as recent
    try:
        find_in_memory(data, key)
    except KeyError:
        return holds(data, key)
    return False


def read_spilled(data: Any, key: Key) -> Any:
    """Return a spilled block, which stays spilled; raise `KeyError` if there is none.

    A CuPy block is returned as a NumPy view of its host memory. If its serialised form is unknown,
    it is restored on the current GPU, and the caller must wait for the copy.
    """
    for level in (*_memory_levels(data), *_slow_levels(data)):
        with suppress(KeyError, FileNotFoundError):  # just moved to the next level
            block = _map_file(level, key)
            if not _is_serialized(block):
                return block
            if (view := _host_view(block)) is not None:
                return view
            with private_stream():
                return _device_host_file().host_to_device(block)
    raise KeyError(key)


def is_mapped(block: Any) -> bool:
    """Return whether a block is memory-mapped, so that keeping it takes no memory."""
    return any(isinstance(base, mmap.mmap) for base in bases(block))


def on_spilled(data: Any, function: Callable[[Any, Any], None]) -> Callable[[], None]:
    """Register a function that is called with the key and value of each block to be spilled.

    The spilling thread calls it, and then frees the block if no other references are left.
    Returns a function that ends the registration.
    """
    ending = ExitStack()
    stores = (data, getattr(data, "device_buffer", None), getattr(data, "host_buffer", None))
    for store in stores:
        if isinstance(store, Buffer):
            store.fast_to_slow_callbacks.append(function)
            ending.callback(store.fast_to_slow_callbacks.remove, function)
    return ending.close


def _memory_levels(data: Any) -> Iterator[Mapping[Any, Any]]:
    if isinstance(data, SpillBuffer):
        yield data.memory
    elif _is_device_host_file(data):
        yield data.others
        yield data.device
        yield data.host  # NumPy blocks, and serialised CuPy blocks
    else:
        yield data


def _slow_levels(data: Any) -> Iterator[Mapping[Any, Any]]:
    if isinstance(data, SpillBuffer):
        yield data.disk
    elif _is_device_host_file(data) and data.disk is not None:
        yield data.host_buffer.slow


def _map_file(level: Mapping[Any, Any], key: Key) -> Any:
    """Return an item of a level; arrays of an item in a file are memory-mapped."""
    files: Any = level
    if isinstance(level, Cache):  # holds weak references to blocks
        with suppress(KeyError):
            return level.cache[key]  # still referenced elsewhere
        files = level.data
    if not isinstance(files, Func) or not isinstance(files.d, File):
        return level[key]
    names: Mapping[Any, str] = files.d.filenames
    path = os.path.join(files.d.directory, names[key])
    with open(path, "rb") as file:
        # Private and writable: Dask copies arrays that are read-only.
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return files.load(memoryview(content))


def _is_serialized(block: Array) -> bool:
    module = _device_host_file()
    return module is not None and isinstance(block, module.DeviceSerialized)


def _host_view(block: Any) -> np.ndarray[Any, Any] | None:
    """Return a NumPy view of a serialised CuPy block; None if its form is unknown.

    The known form is that of `distributed.protocol.cupy`, in dask-cuda's `DeviceSerialized`.
    """
    try:
        header, (frame,) = block.header["sub-header"], block.frames
        raw = np.frombuffer(frame, np.uint8)
        view = np.ndarray(header["shape"], header["typestr"], raw, 0, header["strides"])
        package, _, name = block.header["type"].rpartition(".")
        is_known = (package.partition(".")[0], name) == ("cupy", "ndarray")
    except (AttributeError, KeyError, TypeError, ValueError, BufferError):
        return None
    if not is_known or block.header["serializer"] != "dask" or view.nbytes != raw.nbytes:
        return None
    view.flags.writeable = False
    return view


def _is_device_host_file(data: Any) -> bool:
    module = _device_host_file()
    return module is not None and isinstance(data, module.DeviceHostFile)


def _device_host_file() -> Any:
    """Return dask-cuda's module if it is imported, since only that module makes such stores."""
    return sys.modules.get("dask_cuda.device_host_file")


# Reuse of host memory: memory of released outputs is kept for a while, for new outputs.
#
# New memory is expensive: the system clears each page at its first touch, which takes a fifth of an
# exchange's time. On Dask's workers, the C library returns freed memory to the system immediately.

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
