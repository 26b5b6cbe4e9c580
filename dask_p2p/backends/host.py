"""A permutation of axes in host memory, block by block.

::

        src, read                              dst, written
        512 columns ->                         rows ->
      r +-----+-----+---                     5 +-----+-----+---
      o |  1  |  3  |                        1 |  1  |  2  | ..
      w +-----+-----+---                     2 +-----+-----+---
      s |  2  |  4  |                          |  3  |  4  | ..
        +-----+-----+---                       +-----+-----+---

An assignment writes one row of `dst` after another. Each row takes one item from each of many cache
lines of `src`. When the next row needs their neighbours, those lines have been evicted, so each
line is fetched once per item. Here the copy goes block by block, in the order of `dst`. A block has
so few source rows that their lines stay in the cache.

This is the tiling of G. Ruetsch and P. Micikevicius, "Optimizing Matrix Transpose in CUDA" (NVIDIA,
2009), with the CPU's cache instead of shared memory. NumPy releases the interpreter lock inside
each block.
"""

from __future__ import annotations

import os
import platform
import re
import sys
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from functools import cache, lru_cache
from importlib.metadata import distributions
from importlib.util import find_spec
from itertools import product
from math import gcd, inf, prod
from threading import Lock
from typing import Any, Generic, TypeVar
from uuid import UUID

import numpy as np

from dask_p2p import tuning
from dask_p2p.backends.base import Backend, Timer, transpose_view
from dask_p2p.backends.device import device_work
from dask_p2p.errors import DeviceLostError
from dask_p2p.geometry import box_slices, split_box, whole_box
from dask_p2p.types import Array, DTypeLike

_CACHE_WAY_BYTES = 4096  # addresses that are equal modulo this size compete for cache lines


def permute_into(dst: Array, src: Array, axes: Sequence[int]) -> None:
    """Do ``dst[...] = src.transpose(axes)``, bit for bit; see `Backend.permute_into`."""
    view = transpose_view(dst, src, axes)
    if dst.dtype.names and not dst.dtype.hasobject:
        # NumPy would copy structures field by field, without their padding.
        raw = f"V{dst.dtype.itemsize}"
        dst, view = dst.view(raw), view.view(raw)
    block = None
    if dst.size >= tuning.current.blocked_items:
        block = block_shape(dst.shape, view.strides, dst.strides)
    if block is None:
        dst[...] = view  # for small arrays twice as fast as np.copyto
        return
    along = (
        [slice(start, min(start + step, extent)) for start in range(0, extent, step)]
        for extent, step in zip(dst.shape, block, strict=True)
    )
    for box in product(*along):
        dst[box] = view[box]


@lru_cache(maxsize=1024)  # a call costs as much as a copy of 10 000 items, and blocks are similar
def block_shape(
    shape: tuple[int, ...],  # shape of `dst`, and of the transposed `src`
    src_strides: tuple[int, ...],  # in bytes, in the order of the axes of `dst`
    dst_strides: tuple[int, ...],
) -> tuple[int, ...] | None:
    """Return the shape of the blocks to copy one by one, or None for a plain copy.

    Its axes are in the order of `dst`.

    >>> block_shape((10000, 10000), (8, 80000), (80000, 8))  # float64, transposed
    (512, 256)
    >>> block_shape((10000, 10000), (80000, 8), (80000, 8)) is None  # same order
    True
    """
    # Axes of `dst`, with its contiguous axis first.
    by_dst = sorted(
        (a for a in range(len(shape)) if shape[a] > 1), key=lambda a: abs(dst_strides[a])
    )
    moving = [a for a in by_dst if src_strides[a]]
    if not moving:
        return None
    row_axis = by_dst[0]
    column_axis = min(moving, key=lambda a: abs(src_strides[a]))
    # Number of cache lines that are used before the first one is used again.
    lines = prod(shape[a] for a in by_dst[: by_dst.index(column_axis)])
    sizes = tuning.current
    # Rows at this distance that fit into the first-level cache.
    rows_per_way = _CACHE_WAY_BYTES // competing_bytes(src_strides[row_axis])
    cached_rows = sizes.cache_ways * rows_per_way
    most_rows = sizes.most_block_rows
    if lines <= (sizes.unblocked_rows if cached_rows >= most_rows else cached_rows):
        return None
    columns = min(shape[column_axis], sizes.block_columns)
    rows = max(min(cached_rows, most_rows), sizes.least_block_rows, sizes.block_items // columns)
    block = [1] * len(shape)
    for axis, extent in ((column_axis, columns), (row_axis, rows)):
        block[axis] = min(extent, shape[axis])
    for axis in by_dst:
        if axis not in (column_axis, row_axis):
            block[axis] = max(1, min(shape[axis], sizes.grown_block_items // prod(block)))
    return tuple(block)


def competing_bytes(stride_bytes: int) -> int:
    """Return the distance of such rows in a cache way: if it is large, they share few lines."""
    return gcd(stride_bytes, _CACHE_WAY_BYTES)


# Threads fill slots of pinned memory. With 1, 2, 4, 8 and 12 of them, on an H200's host with 16
# cores, blocks of 256 MiB went through the GPU at 10, 17, 25, 32 and 28 GB/s, both ways together.
# Pinned in place for that time, such blocks reached 23 to 26 GB/s. Blocks of 1 GiB reached 50 GB/s
# with 8 or 12 threads, and 31 GB/s pinned in place.
_FEW_THREADS = 4
_REGISTER_FROM_BYTES = 2**24
_LEAST_COPY_BYTES = 2**20  # least size of a copy by other threads
_BYTES_EACH = 2**22  # least for each thread: a submission takes as long as a copy of half a MiB


def copy_on_host(to: np.ndarray[Any, Any], src: np.ndarray[Any, Any]) -> None:
    """Copy an array of the host, by several threads if it is large, and wait for the end."""
    start_copy(to, src)()


def start_copy(to: np.ndarray[Any, Any], src: np.ndarray[Any, Any]) -> Callable[[], None]:
    """Start to copy an array of the host by threads; return a function that waits for the end.

    A small array is copied before the call returns.
    """

    def copy(part: Any) -> None:
        permute_into(to[part], src[part], range(src.ndim))

    if src.nbytes < _LEAST_COPY_BYTES:
        copy(...)
        return lambda: None
    box, count = whole_box(src.shape), min(thread_count(), -(-src.nbytes // _BYTES_EACH))
    parts = map(box_slices, split_box(box, -(-src.size // count)))
    copies = [pool().submit(copy, part) for part in parts]

    def wait() -> None:
        for copy_future in copies:
            copy_future.result()

    return wait


def register_from_bytes() -> float:
    """Return the least size of a block that a GPU reads faster if it is pinned in place.

    It is infinite with four or more threads that can copy blocks into pinned memory.
    """
    return _REGISTER_FROM_BYTES if thread_count() < _FEW_THREADS else inf


class RepeatingTimer:
    """Calls a function, which may use the device, at intervals until it returns False."""

    def __init__(
        self,
        interval_s: float,
        function: Callable[[], bool],
        timer: Callable[..., threading.Timer] = threading.Timer,
    ) -> None:
        self.interval_s = interval_s
        self._function, self._make_timer = function, timer
        self._timer: threading.Timer | None = None
        self._cancels = 0  # calls of `cancel` so far
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the timer, unless it is running. Any thread may call this."""
        with self._lock:
            self._start()

    def _start(self) -> None:
        if self._timer is None:
            self._timer = self._make_timer(self.interval_s, self._call)
            self._timer.daemon = True
            self._timer.start()

    def cancel(self) -> None:
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = None
            self._cancels += 1

    def _call(self) -> None:
        # Reset first: a `start` from here on may come too late for this call.
        with self._lock:
            self._timer, cancels = None, self._cancels
        with suppress(DeviceLostError), device_work():  # a lost device has lost its memory too
            if self._function():
                with self._lock:
                    if cancels == self._cancels:
                        self._start()


# The distributions of the last four have names that end in CUDA's version.
_PACKAGES = (
    *("dask-p2p", "dask", "distributed", "numpy", "dask-cuda"),
    *("cupy", "ucxx", "libucx", "rmm"),
)


@cache
def kernel_and_namespace() -> tuple[str, str]:
    """Return the boot id of the Linux kernel, and the process's PID namespace."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip(), os.readlink("/proc/self/ns/pid")


def computes_on_gpu() -> bool:
    """Return true if this process computes on a GPU, without loading a library.

    It has loaded CuPy, or dask-cuda started it; then it may load CuPy with its first block.
    """
    if "cupy" in sys.modules:
        return True
    return "dask_cuda" in sys.modules and find_spec("cupy") is not None


def link_gbs(uuid: bytes) -> float | None:
    """Return the nominal rate of all NVLinks of a GPU one way, GB (1e9 bytes) a second.

    None without a driver or without NVLinks. The UUID has 16 bytes.
    """
    try:
        import pynvml

        pynvml.nvmlInit()
        text = f"GPU-{UUID(bytes=uuid)}"
        handle = pynvml.nvmlDeviceGetHandleByUUID(text)
        fields = [pynvml.NVML_FI_DEV_NVLINK_LINK_COUNT, pynvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON]
        count, speed_mbs = (
            value.value.uiVal for value in pynvml.nvmlDeviceGetFieldValues(handle, fields)
        )
    except Exception:  # pynvml has an error class for each cause
        return None
    return count * speed_mbs / 1e3 or None


def versions() -> dict[str, str | None]:
    """Return the versions of packages that affect measurements; None if not installed."""
    installed = [
        ((d.metadata["Name"] or "").lower().replace("_", "-"), d.version) for d in distributions()
    ]
    result: dict[str, str | None] = {"python": platform.python_version()}
    for name in _PACKAGES:
        pattern = re.compile(rf"{name}(-cu(da)?\d+x?)?")
        result[name] = next((v for n, v in installed if pattern.fullmatch(n)), None)
    return result


def cpu_name() -> str:
    """Return the model of this machine's CPU."""
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                label, _, value = line.partition(":")
                if label.strip() == "model name":
                    return value.strip()
    except OSError:  # not Linux
        pass
    return platform.processor() or platform.machine()


_MOST = 8


@cache
def thread_count() -> int:
    """Return the number of threads: the cores that this process may use, at most eight."""
    return min(_MOST, len(os.sched_getaffinity(0)))


@cache
def pool() -> ThreadPoolExecutor:
    """Return the pool of these threads."""
    return ThreadPoolExecutor(thread_count(), "p2p-slots")


_T = TypeVar("_T")


class IdentityCache(Generic[_T]):
    """Results by object, and by another key. Thread-safe.

    The objects are kept, so that no other object gets the identity of one of them.
    """

    def __init__(
        self,
        max_size: int = 1024,  # sum of the sizes of results: then all are dropped
        size: Callable[[_T], int] = lambda _: 1,
    ) -> None:
        self._max_size, self._size = max_size, size
        self._results: dict[tuple[int, Hashable], tuple[Any, _T]] = {}
        self._sum = 0  # of the sizes
        self._lock = Lock()  # held while a result is added

    def get(self, instance: Any, key: Hashable, compute: Callable[[], _T]) -> _T:
        identity = id(instance), key
        cached = self._results.get(identity)
        if cached is None:
            cached = instance, compute()
            size = self._size(cached[1])
            with self._lock:
                if identity not in self._results:  # by another thread
                    if self._sum + size > self._max_size:
                        self._results.clear()
                        self._sum = 0
                    self._results[identity] = cached
                    self._sum += size
        return cached[1]


class HostQueue:
    """The queue of NumPy arrays, an in-order queue of kernels for one assembled block.

    Queues give host and device memory the same interface. On a CPU work is finished when a call
    returns, on a GPU (`DeviceQueue`) when the queue is synchronised.
    """

    def __init__(self, backend: Backend, pinned_output: bool = False) -> None:
        self.kind = backend.name
        #: True if pinned memory is better for its output, which comes from a GPU.
        self.pinned_output = pinned_output
        self._backend = backend

    def empty(self, shape: Sequence[int], dtype: DTypeLike) -> Array:
        """Return a new C-ordered array of the queue's kind for callers, with undefined values."""
        return self._backend.empty(shape, dtype)

    scratch = empty  # for the package's own use; drop it after all work with it

    def wait_until_written(self, blocks: Iterable[Any], *, any_stream: bool) -> None:
        """Wait until the producers have written these blocks; see `dask_p2p.backends.device`."""

    def permute(
        self, dst: Array, src: Array, axes: Sequence[int], *, concurrent: bool = False
    ) -> None:
        """Do ``dst[...] = src.transpose(axes)`` after the work queued before.

        `concurrent`: unordered with the other work, and in parallel if the device has room.
        """
        self._backend.permute_into(dst, src, axes)

    def permute_and_drop(self, dst: Array, src: Array, axes: Sequence[int]) -> None:
        """Permute an array of any backend that only the caller refers to.

        The caller can drop `src` immediately: the queue keeps it until it has been read.
        """
        self.permute(dst, src if isinstance(src, np.ndarray) else src.get(), axes)

    def fill(self, dst: Array, value: Any) -> None:
        """Fill `dst` with an item, bit for bit: a 0-d NumPy array of the same dtype."""
        self.permute(dst, np.broadcast_to(value, dst.shape), range(dst.ndim))

    def prefetch(self, src: Array, slot_bytes: int) -> Any:
        """Start to copy a part of a block in another GPU's memory.

        Pass the result to `permute_prefetched`, which copies it into the output. After `SLOTS`
        prefetched parts, one must go to `permute_prefetched` before the next `prefetch`. Parts of
        at most `slot_bytes` may go through local memory; larger ones are read in place. The queue
        keeps the part until all queued work is finished.
        """
        return src

    def permute_prefetched(self, dst: Array, part: Any, axes: Sequence[int]) -> None:
        self.permute(dst, part, axes)

    def pack(self, dst: Array, src: Array) -> Callable[[], None]:
        """Queue a copy of a region into a C-ordered array; return a function that waits for it."""
        self.permute(dst, src, range(src.ndim))
        return self.synchronize

    def to_host(self, array: Array) -> Any:
        """Return an array of `scratch` as a NumPy array, after the work queued before."""
        return array

    def timing(self, timer: Timer) -> AbstractContextManager[None]:
        """Return a context that adds the time of its work to `timer`, when the queue synchronises.

        It does not nest. On a device the time is that of kernels and of copies from other GPUs. It
        lasts from the start of the first to the end of the last on each stream, concurrent work
        included, without waits for slots. On the host it is the time of the whole context.
        """
        return timer

    def synchronize(self) -> None:
        """Wait until all queued work is finished."""
