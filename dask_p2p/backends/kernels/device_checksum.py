"""Checksums of bytes in a GPU's memory, by one launch of checksums.cu.

Import this module only if CuPy is installed.
"""

from __future__ import annotations

import cupy
import numpy as np

from dask_p2p.backends.kernels.source import CudaSource
from dask_p2p.types import Array

_THREADS = 256
_MOST_BLOCKS = 512  # enough to use the memory's bandwidth; each thread adds to one total
_ALIGNMENT_BYTES = 8

_SOURCE = CudaSource("checksums.cu", lambda module: module.get_function("add_mixed").kernel)
SOURCES = (_SOURCE,)


def mixed_sum(data: Array) -> int:
    """Return the sum of the words of contiguous bytes on the current stream, and wait for it."""
    if not data.size:
        return 0
    if data.data.ptr % _ALIGNMENT_BYTES:
        data = data.copy()
    total = cupy.zeros((), np.uint64)
    blocks = min(_MOST_BLOCKS, -(-data.size // (_THREADS * _ALIGNMENT_BYTES)))
    add = _SOURCE.on(cupy.cuda.runtime.getDevice())
    given = (data.data.ptr, np.uint64(data.size), total.data.ptr)
    add((blocks,), (_THREADS,), given, 0, stream=cupy.cuda.get_current_stream())
    return int(total.get())
