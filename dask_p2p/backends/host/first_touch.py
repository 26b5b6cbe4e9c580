"""The first touch of new host memory, in the page size that is currently faster.

The system allocates and clears each page at its first touch. NumPy requests huge pages, of 2 MiB:
200 MB take 30 ms if the system has free ones. On virtual machines whose host has to provide the
memory they took 400 to 1,500 ms. Pages of 4 KiB took 110 to 200 ms there, because the system reuses
pages (two Xeon cores under KVM, Linux 6.18).
"""

from __future__ import annotations

import ctypes
from functools import cache
from time import perf_counter
from typing import Any

import numpy as np

from dask_p2p import tuning
from dask_p2p.backends.host.threads import pool, thread_count

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
    done: int = _libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(size_bytes), advice)
    return done


@cache
def _libc() -> Any:
    return ctypes.CDLL(None)
