"""Pinned (*registered*) host memory, which a GPU's copy engines access directly.

The driver copies other host memory through its own pinned memory, and the caller waits for it.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache, partial
from mmap import PAGESIZE
from pathlib import Path
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


# The freed memory that the C library keeps in the process.
#
# Dask's nannies start workers with ``MALLOC_TRIM_THRESHOLD_=65536``, so that the C library returns
# the memory of large arrays to the system immediately. This has two prices.
#
# - Each call of a NumPy ufunc takes a buffer of 64 KiB for arrays that are not contiguous. In all
#   threads except a process's first one, the C library also returns this buffer, and the next call
#   touches new pages: 27 us a call. A five-point stencil of 128 x 128 elements took 155 us instead
#   of 48. `keep_small_buffers` ends this for the life of the process.
# - Each temporary array of more than 128 KiB gets new pages from the system, which clears them.
# Steps
#   of plain NumPy expressions take up to five times as long. `keep_temporaries` ends this while
#   a rank's function runs, or a task's function of a large block, and for a second afterwards: the
#   next one may begin then.

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # parameters of mallopt
_LEAST_ARENA_BYTES = 2**20  # limit of each arena; 256 KiB are enough for one buffer
_VARIABLE = b"MALLOC_TRIM_THRESHOLD_="
# The environment at the start of the process, which configures the C library. In a nanny's own
# process the variable is set later: there glibc uses its default, and keeps more.
_ENVIRONMENT = Path("/proc/self/environ")
#: Largest temporaries that are kept: the largest value that glibc accepts.
MOST_BYTES = 2**25
# With a smaller pad glibc returns a heap, of 64 MiB in threads other than the first, when its last
# array is freed. Pages of the pad take no memory until they are used.
_KEPT = {_MMAP_THRESHOLD: MOST_BYTES, _TRIM_THRESHOLD: 2**30, _TOP_PAD: 2**26}
_BEFORE = {_MMAP_THRESHOLD: 2**17, _TRIM_THRESHOLD: _LEAST_ARENA_BYTES, _TOP_PAD: 2**17}

# New pages for arrays of 8 MiB take 1.2 ms of an EPYC core, and kept ones 0.15 ms in all. So free
# memory returns once no context has begun for some time, unless the process has grown by many
# bytes since the first one.
_IDLE_S = 1.0
_MOST_GROWTH_BYTES = 2**28
_MEMORY = Path("/proc/self/statm")
# `malloc_trim` leaves out the free end of a heap, except for that of the first thread.
# glibc returns it when as many bytes as these are freed in the heap, by any thread.
_GUARD_BYTES = 2**16
_HEAP_BYTES = 2**26  # a heap begins at a multiple of its largest size

_lock = threading.Lock()
_keeping = 0  # contexts of `keep_temporaries` that are open
_begun = 0  # contexts so far
_bytes_before = 0  # memory of the process before the first context
_timer: threading.Timer | None = None  # until free memory returns to the system
_guards: dict[int, int] = {}  # addresses, by heap: one in each where a context has ended


@cache
def _glibc() -> Any:
    """Return the C library if its environment sets a low limit, else None."""
    library = ctypes.CDLL(None)
    if getattr(library, "mallopt", None) is None or not _ENVIRONMENT.exists():
        return None
    for setting in _ENVIRONMENT.read_bytes().split(b"\0"):
        size = setting.removeprefix(_VARIABLE)
        if size != setting and not (size.isdigit() and int(size) >= _LEAST_ARENA_BYTES):
            library.malloc.restype = ctypes.c_void_p
            return library
    return None


def keep_small_buffers() -> None:
    """Let the C library keep up to 1 MiB of free memory an arena, if its limit is lower."""
    if (glibc := _glibc()) is not None:
        glibc.mallopt(_TRIM_THRESHOLD, _LEAST_ARENA_BYTES)


def _resident_bytes() -> int:
    with suppress(OSError):
        return int(_MEMORY.read_bytes().split()[1]) * PAGESIZE
    return 0


@contextmanager
def keep_temporaries() -> Iterator[None]:
    """Keep the memory of freed arrays of up to 32 MiB in the process, within a context.

    Later arrays reuse this memory. The process then has as much memory as its arrays had at their
    peak. A second after the last of concurrent contexts, free memory returns to the system;
    immediately if the process has grown by more than 256 MiB. The context changes a process only if
    its environment lowers the limits of the C library.
    """
    global _keeping, _begun, _bytes_before
    glibc = _glibc()
    if glibc is None:
        yield
        return
    with _lock:
        if not _keeping and _timer is None:
            _bytes_before = _resident_bytes()
            _set(glibc, _KEPT)
        _keeping += 1
        _begun += 1
    try:
        yield
    finally:
        _end_context(glibc)


def _end_context(glibc: Any) -> None:
    global _keeping
    guard = glibc.malloc(_GUARD_BYTES) or 0
    with _lock:
        if _guards.setdefault(guard // _HEAP_BYTES, guard) != guard:
            glibc.free(ctypes.c_void_p(guard))
        _keeping -= 1
        if _keeping:
            return
        if _resident_bytes() - _bytes_before > _MOST_GROWTH_BYTES:
            _set(glibc, _BEFORE)
            _trim(glibc)
            _set(glibc, _KEPT)
        if _timer is None:
            _schedule_return(glibc)


def _schedule_return(glibc: Any) -> None:
    """Return free memory later, unless a context begins first."""
    global _timer
    _timer = threading.Timer(_IDLE_S, _return_unused, (glibc, _begun))
    _timer.daemon = True
    _timer.start()


def _return_unused(glibc: Any, begun: int) -> None:
    global _timer
    with _lock:
        if _keeping or begun < _begun:
            _schedule_return(glibc)
            return
        _set(glibc, _BEFORE)
        _trim(glibc)
        _timer = None


def _trim(glibc: Any) -> None:
    """Return the free memory of all threads, once the limits are low."""
    while _guards:
        glibc.free(ctypes.c_void_p(_guards.popitem()[1]))
    glibc.malloc_trim(0)


def _set(glibc: Any, values: Mapping[int, int]) -> None:
    for parameter, value in values.items():
        glibc.mallopt(parameter, value)
