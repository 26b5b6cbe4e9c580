"""Checksums of bytes in a GPU's memory, by one launch of checksums.cu.

A checksum is a sum modulo 2**64 over words of 8 bytes, the last one padded with zeros. Each word is
first mixed with its position (by the finaliser of splitmix64). This map is one to one for each
position, so the checksum finds every change within one word. One in 2**64 of all other changes
passes. A sum of words times odd weights would be one to one as well, but two flipped signs anywhere
would cancel each other.

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
    """Return the checksum of contiguous bytes on the current stream, and wait for it."""
    if data.data.ptr % _ALIGNMENT_BYTES:
        data = data.copy()
    total = cupy.zeros((), np.uint64)
    blocks = min(_MOST_BLOCKS, -(-data.size // (_THREADS * _ALIGNMENT_BYTES)))
    add = _SOURCE.on(cupy.cuda.runtime.getDevice())
    given = (data.data.ptr, np.uint64(data.size), total.data.ptr)
    add((blocks,), (_THREADS,), given, 0, stream=cupy.cuda.get_current_stream())
    return int(total.get())
