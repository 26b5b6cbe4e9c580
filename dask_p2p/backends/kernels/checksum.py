"""Checksums of arrays' bytes, in C order.

There are two algorithms, one for each kind of memory. Either works with the arrays of any backend,
so that two processes with arrays of different libraries can compare checksums.

``crc32``
    CRC-32 of zlib, for host memory: fast there, and useless on a GPU. It finds every change of one
    bit, of two bits (up to 2**32 - 1 bits, 512 MiB) and of three bits (up to 11 KiB). It finds
    every change within 32 bits in a row. One in 2**32 of all other changes passes.
``mixed64``
    For device memory: a sum modulo 2**64 over words of 8 bytes, the last one padded with zeros.
    Each word is first mixed with its position (by the finaliser of splitmix64). This map is one to
    one for each position, so the checksum finds every change within one word, also of one bit. One
    in 2**64 of all other changes passes. A sum of words times odd weights would be one to one as
    well, but two flipped signs anywhere would cancel each other.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from dask_p2p.backends import backend_for
from dask_p2p.types import Array

ALGORITHMS = ("crc32", "mixed64")


def checksum(array: Array, algorithm: str | None = None, start: int = 0) -> int:
    """Return the checksum of an array's bytes, below 2**64. This may block: call it from a thread.

    All writes to the array must have finished, on any stream. The default algorithm is the best one
    for the array. `start` is the checksum of the preceding bytes.
    """
    backend = backend_for(array)
    if algorithm is None:
        algorithm = backend.checksum_algorithm
    if algorithm not in ALGORITHMS:
        raise ValueError(f"expected one of {', '.join(ALGORITHMS)}, got {algorithm!r}")
    with backend.checksum_stream(array):
        if algorithm == "crc32":
            return zlib.crc32(_bytes_of(np, backend.to_host(array)), start % 2**32)
        data = _bytes_of(backend.module, array)
        return int(start + data.size + backend.mixed_sum(data)) % 2**64


def _bytes_of(xp: Any, array: Array) -> Any:
    if not array.nbytes:
        return np.empty(0, np.uint8)
    return xp.ascontiguousarray(array).reshape(-1).view("u1")
