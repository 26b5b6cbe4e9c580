"""The freed memory that the C library keeps in a worker's process.

Dask's nannies start workers with ``MALLOC_TRIM_THRESHOLD_=65536``, so that the C library returns
the memory of large arrays to the system immediately. This has two prices.

- Each call of a NumPy ufunc takes a buffer of 64 KiB for arrays that are not contiguous. In all
  threads except a process's first one, the C library also returns this buffer, and the next call
  touches new pages: 27 us a call. A five-point stencil of 128 x 128 elements took 155 us instead
  of 48. `keep_small_buffers` ends this for the life of the process.
- Each temporary array of more than 128 KiB gets new pages from the system, which clears them. Steps
  of plain NumPy expressions take up to five times as long. `keep_temporaries` ends this while
  a rank's function runs, or a task's function of a large block, and for a second afterwards: the
  next one may begin then.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from mmap import PAGESIZE
from pathlib import Path
from typing import Any

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
# `malloc_trim` leaves out the free end of a heap, except for that of the first thread. glibc
# returns this end when any thread frees as many bytes in the heap as the guard has.
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
    while _guards:
        glibc.free(ctypes.c_void_p(_guards.popitem()[1]))
    glibc.malloc_trim(0)


def _set(glibc: Any, values: Mapping[int, int]) -> None:
    for parameter, value in values.items():
        glibc.mallopt(parameter, value)
