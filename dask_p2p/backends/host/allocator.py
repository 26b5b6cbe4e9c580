"""The freed memory that the C library keeps for a thread.

Dask's nannies start workers with ``MALLOC_TRIM_THRESHOLD_=65536``, so that the C library returns
the memory of large arrays to the system immediately. Each call of a NumPy ufunc takes a buffer of
64 KiB for arrays that are not contiguous. In all threads except a process's first one, the C
library also returns this buffer, and the next call touches new pages: 27 us a call. A five-point
stencil of 128 x 128 elements took 155 us instead of 48.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

_TRIM_THRESHOLD = -1  # M_TRIM_THRESHOLD
_LEAST_BYTES = 2**20  # limit of each arena; 256 KiB are enough for one buffer
_VARIABLE = b"MALLOC_TRIM_THRESHOLD_="
# The environment at the start of the process, which configures the C library. In a nanny's own
# process the variable is set later: there glibc uses its default, and keeps more.
_ENVIRONMENT = Path("/proc/self/environ")


def keep_small_buffers() -> None:
    """Let the C library keep up to 1 MiB of free memory an arena, if its limit is lower."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # of glibc
    if mallopt is None or not _ENVIRONMENT.exists():
        return
    for each in _ENVIRONMENT.read_bytes().split(b"\0"):
        size_text = each.removeprefix(_VARIABLE)
        if size_text != each and not (size_text.isdigit() and int(size_text) >= _LEAST_BYTES):
            mallopt(_TRIM_THRESHOLD, _LEAST_BYTES)
