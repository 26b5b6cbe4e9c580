"""Pinned (*registered*) host memory, which a GPU's copy engines access directly.

The driver copies other host memory through its own pinned memory, and the caller waits for it.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache, partial
from queue import SimpleQueue
from time import perf_counter
from typing import Any

import numpy as np

from dask_p2p import tuning
from dask_p2p.backends.device import device_work
from dask_p2p.backends.host import pool, thread_count

CANNOT_PIN = "host memory cannot be pinned"
REMEDY = (
    "Copies to and from its GPU go through other memory, and are slower. Check the limits of the "
    "system and the container: ulimit -l, and memory limits."
)
_PORTABLE_AND_MAPPED = 3  # flags of cudaHostRegister: for all GPUs of the process, and kernels


class Pinned:
    """Memory of this process that is pinned until it is freed, with NumPy's array interface.

    It is a mapping of its own, because whole pages are pinned, which no other memory may share.
    """

    def __init__(self, size_bytes: int) -> None:
        pages = mmap.mmap(-1, max(1, size_bytes))
        with suppress(OSError):  # as NumPy does; not all systems have huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
        self.bytes = np.frombuffer(pages, np.uint8)
        touch_by_threads(self.bytes)
        self.nbytes = size_bytes
        pin_while(self, self.bytes)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        interface: dict[str, Any] = self.bytes.__array_interface__
        return interface


def is_pinned(array: Any) -> bool:
    """Return true if an array lies in memory that this package has pinned for its lifetime."""
    return any(isinstance(getattr(b, "memory", b), Pinned) for b in bases(array))


def pin_in_place(array: np.ndarray[Any, Any]) -> Callable[[], None] | None:
    """Pin an array's memory in place; return the function that unpins it, or None on failure.

    Memory cannot be pinned if it, or another part of one of its pages, is pinned already.
    """
    import cupy

    try:
        return register(array)
    except cupy.cuda.runtime.CUDARuntimeError:
        return None


_warned: set[tuple[str, str]] = set()


def warn_once(
    warn: Callable[[str], None], where: str, problem: str, cause: str, remedy: str = REMEDY
) -> None:
    """Warn of a worker's problem once in this process."""
    if (where, problem) not in _warned:
        _warned.add((where, problem))
        warn(f"dask_p2p: {where}: {problem} ({cause}). {remedy}")


def pin_while(owner: Any, memory: np.ndarray[Any, Any]) -> Callable[[], Any]:
    """Pin memory until its owner is freed, or the function that is returned is called."""
    unpin = register(memory)
    _start()
    ending = weakref.finalize(owner, _leaving.put, (unpin, memory))
    ending.atexit = False
    return ending


def register(array: np.ndarray[Any, Any]) -> Callable[[], None]:
    """Pin the memory of an array; return the function that unpins it."""
    import cupy

    runtime = cupy.cuda.runtime
    low, high = np.lib.array_utils.byte_bounds(array)
    runtime.hostRegister(low, high - low, _PORTABLE_AND_MAPPED)
    return partial(runtime.hostUnregister, low)


# Memory to unpin, which takes 16 ms a GB. A thread does it, because the last reference may be
# dropped on an event loop, or in a garbage collection that interrupts the holder of a lock.
_leaving: SimpleQueue[tuple[Callable[[], None], Any]] = SimpleQueue()


@cache
def _start() -> None:
    threading.Thread(target=_unpin, name="p2p-unpin", daemon=True).start()


def _unpin() -> None:
    while True:
        unpin, memory = _leaving.get()
        with suppress(Exception), device_work():  # for example, the GPU is lost
            unpin()
        del unpin, memory


def bases(array: Any) -> Iterator[Any]:
    """Yield an array and the chain of objects that own its memory."""
    while array is not None:
        yield array
        array = array.obj if isinstance(array, memoryview) else getattr(array, "base", None)


# The first touch of new host memory, in the page size that is currently faster.
#
# The system allocates and clears each page at its first touch. NumPy requests huge pages, of 2 MiB:
# 200 MB take 30 ms if the system has free ones. On virtual machines whose host has to provide the
# memory they took 400 to 1,500 ms. Pages of 4 KiB took 110 to 200 ms there, because the system
# reuses pages (two Xeon cores under KVM, Linux 6.18).

_LEAST_TOUCH_BYTES = 2**22  # NumPy requests huge pages from this size on
_PAGE_BYTES = 2**12
_STEP_BYTES = 2**22
_SLOW_S = 4e-3  # a step takes 0.5 to 1 ms with free huge pages, 8 to 30 ms without, 2 with small
_NO_HUGE_PAGES = 15  # MADV_NOHUGEPAGE
_POPULATE = 23  # MADV_POPULATE_WRITE, since Linux 5.14


def first_touch(array: np.ndarray[Any, Any]) -> None:
    """Let the system provide the pages of a C-ordered array with undefined values."""
    if array.nbytes < _LEAST_TOUCH_BYTES:
        return
    start = -(-array.ctypes.data // _PAGE_BYTES) * _PAGE_BYTES
    stop = (array.ctypes.data + array.nbytes) // _PAGE_BYTES * _PAGE_BYTES
    begun_s = perf_counter()
    while start < stop:
        step_bytes = min(_STEP_BYTES, stop - start)
        if _advise(start, step_bytes, _POPULATE):
            return  # an older system, which provides pages when the array is written
        start += step_bytes
        now_s = perf_counter()
        if now_s - begun_s > _SLOW_S:
            _advise(start, stop - start, _NO_HUGE_PAGES)
            _advise(start, stop - start, _POPULATE)
            return
        begun_s = now_s


def touch_by_threads(memory: np.ndarray[Any, Any]) -> None:
    """Touch bytes by several threads: most of the time that new pinned memory takes."""
    step_bytes = max(tuning.current.first_touch_bytes, -(-memory.nbytes // thread_count()))
    parts = (memory[at:][:step_bytes] for at in range(0, memory.nbytes, step_bytes))
    for _ in pool().map(first_touch, parts):
        pass


def _advise(start: int, size_bytes: int, advice: int) -> int:
    """Call `madvise` without the interpreter lock; return 0 on success."""
    status: int = _libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(size_bytes), advice)
    return status


@cache
def _libc() -> Any:
    return ctypes.CDLL(None)
