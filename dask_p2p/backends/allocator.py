"""What the C library keeps of the memory that a thread gives back.

Dask's nannies start workers with ``MALLOC_TRIM_THRESHOLD_=65536``, so that large arrays go back to
the system at once. In all threads but a process's first one this also gives back the buffer of
64 KiB that each call of a NumPy ufunc takes for arrays that are not contiguous, and the next call
has to touch new pages: 27 us a call. Five points of 128 x 128 elements took 155 us instead of 48.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

_TRIM_THRESHOLD = -1  # M_TRIM_THRESHOLD
_LEAST_BYTES = 2**20  # 256 KiB are enough for one buffer; each arena keeps at most this much
_VARIABLE = b"MALLOC_TRIM_THRESHOLD_="
# As the process was started with, and the C library with it: a nanny leaves the variable in the
# environment of its own process, where glibc chooses by itself, and keeps more.
_ENVIRONMENT = Path("/proc/self/environ")


def keep_small_buffers() -> None:
    """Have this process keep up to 1 MiB of free memory an arena, if it was to keep less."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # of glibc
    if mallopt is None or not _ENVIRONMENT.exists():
        return
    for each in _ENVIRONMENT.read_bytes().split(b"\0"):
        told = each.removeprefix(_VARIABLE)
        if told != each and not (told.isdigit() and int(told) >= _LEAST_BYTES):
            mallopt(_TRIM_THRESHOLD, _LEAST_BYTES)
