"""What the C library keeps of the memory that a thread gives back.

Dask's nannies start workers with ``MALLOC_TRIM_THRESHOLD_=65536``, so that large arrays go back to
the system at once. In all threads but a process's first one this also gives back the buffer of
64 KiB that each call of a NumPy ufunc takes for arrays that are not contiguous, and the next call
has to touch new pages: 27 us a call. Five points of 128 x 128 elements took 155 us instead of 48.
"""

from __future__ import annotations

import ctypes
import os

_TRIM_THRESHOLD = -1  # M_TRIM_THRESHOLD
_LEAST_BYTES = 2**20  # 256 KiB are enough for one buffer; each arena keeps at most this much


def keep_small_buffers() -> None:
    """Have this process keep up to 1 MiB of free memory an arena, if it was to keep less.

    Without the variable glibc keeps more by itself. Other C libraries know neither.
    """
    told = os.environ.get("MALLOC_TRIM_THRESHOLD_")
    if told is None or (told.isdecimal() and int(told) >= _LEAST_BYTES):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, _LEAST_BYTES)
